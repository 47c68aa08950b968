"""The report's style sheet: system fonts, one accent colour, light or dark as the reader's machine prefers."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f9; --ink: #1d2530; --muted: #5d6773; --line: #e1e5ea;
  --accent: #0f6b8f; --band: #b9d6e2; --prefix: #fdf0c8; --prefix-ink: #4a3b07;
  --good: #2f6b3a; --good-soft: #e1f0e3; --bad: #9c3325; --bad-soft: #f8e4e0;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171b21; --raised: #1f252d; --ink: #e6e9ee; --muted: #9aa4b1; --line: #2f3742;
    --accent: #6cc3e2; --band: #2b5767; --prefix: #463a12; --prefix-ink: #f6e7b4;
    --good: #8fd09c; --good-soft: #1e3524; --bad: #f0a294; --bad-soft: #432420;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 400 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 2.75rem 1.25rem 4rem; }
h1, h2 { letter-spacing: -.012em; line-height: 1.2; }
h1 { margin: 0; font-size: 2rem; font-weight: 680; overflow-wrap: anywhere; }
h2 { margin: 3.25rem 0 .35rem; font-size: 1.3rem; font-weight: 660; }
h3 { margin: 2rem 0 .35rem; font-size: 1rem; font-weight: 640; }
p { margin: .35rem 0 .9rem; max-width: 48rem; }
.eyebrow { margin: 0 0 .3rem; color: var(--muted); font-size: .875rem; }
.verdict {
  margin: 1.25rem 0 1.75rem; padding: .1rem 0 .1rem 1rem; border-left: 3px solid var(--accent);
  font-size: 1.125rem; line-height: 1.5;
}
.note { color: var(--muted); font-size: .9rem; }
.absent { color: var(--muted); font-style: italic; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.15rem; margin: 1.5rem 0 0; font-size: .9rem; }

.chain { display: flex; gap: 1.35rem; margin: 0; padding: 0; list-style: none; }
.chain li {
  position: relative; flex: 1 1 0; min-width: 0; padding: .5rem .65rem; background: var(--raised);
  border: 1px solid var(--line); border-radius: .45rem; font-size: .78rem; line-height: 1.4; color: var(--muted);
}
.chain b { display: block; color: var(--ink); font-size: .84rem; font-weight: 620; overflow-wrap: anywhere; }
.chain span + b { margin-top: .4rem; }
.chain li + li::before {
  content: "\\2192"; position: absolute; left: -1.15rem; top: 50%; transform: translateY(-50%); font-size: .9rem;
}

.scroll { overflow-x: auto; margin: .6rem 0 1rem; }
table { width: 100%; border-collapse: collapse; font-size: .92rem; }
th, td { padding: .5rem 1.25rem .5rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
thead th {
  color: var(--muted); font-weight: 560; font-size: .85rem; line-height: 1.35;
  vertical-align: bottom; border-bottom-color: var(--muted);
}
thead small { font-weight: 400; }
tbody th { font-weight: 600; white-space: nowrap; }
.n + td:not(.n), .n + th:not(.n) { padding-left: 1.25rem; }
.narrow table { width: auto; min-width: 50%; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
small { color: var(--muted); font-size: .8rem; white-space: nowrap; }
.acc { min-width: 9.5rem; font-variant-numeric: tabular-nums; line-height: 1.35; }
.acc strong { font-size: 1.05rem; font-weight: 640; }
.bar { position: relative; display: block; height: .5rem; margin: .35rem 0 .3rem; }
.bar { background: var(--raised); border-radius: .25rem; box-shadow: inset 0 0 0 1px var(--line); }
.bar i { position: absolute; top: 0; bottom: 0; background: var(--band); border-radius: .25rem; }
.bar b { position: absolute; top: -.12rem; bottom: -.12rem; width: 3px; margin-left: -1.5px; border-radius: 2px; }
.bar b { background: var(--accent); }
.tag {
  display: inline-block; padding: .05rem .5rem; border-radius: 1rem; background: var(--raised); color: var(--muted);
  font-size: .78rem; font-weight: 500;
}
.tag.good { background: var(--good-soft); color: var(--good); }
.tag.bad { background: var(--bad-soft); color: var(--bad); }

.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.figures { gap: 1.25rem 1.75rem; margin: 1rem 0; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; border-radius: .3rem; }

.sample { margin: .85rem 0; border: 1px solid var(--line); border-radius: .5rem; overflow: hidden; }
.sample header { display: flex; flex-wrap: wrap; gap: .3rem .75rem; align-items: center; padding: .5rem .85rem; }
.sample header { background: var(--raised); font-size: .84rem; color: var(--muted); }
.sample header b { color: var(--ink); font-weight: 620; }
.sample p, .sample pre { margin: 0; max-width: none; white-space: pre-wrap; overflow-wrap: anywhere; }
.sample p, .sample pre { unicode-bidi: isolate; }
.sample p { padding: .7rem .85rem 0; font-size: .95rem; }
.sample pre { padding: .6rem .85rem .8rem; font: .84rem/1.6 var(--mono); }
mark { background: var(--prefix); color: var(--prefix-ink); border-radius: .15rem; padding: .1em 0; }
mark { box-decoration-break: clone; -webkit-box-decoration-break: clone; }

details { margin: .75rem 0; border: 1px solid var(--line); border-radius: .5rem; padding: 0 .85rem; }
summary { margin: 0 -.85rem; padding: .6rem .85rem; cursor: pointer; font-size: .95rem; font-weight: 600; }
details[open] { padding-bottom: .35rem; }
code, .code { font: .86em/1.5 var(--mono); overflow-wrap: anywhere; }
th .code { font-weight: 400; white-space: normal; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--muted); }
footer { font-size: .85rem; }

@media (max-width: 52rem) {
  .chain { flex-direction: column; gap: 1.1rem; }
  .chain li { padding: .35rem .65rem; }
  .chain li + li::before { content: "\\2193"; left: .75rem; top: -1.2rem; transform: none; }
  .chain b { display: inline; margin-right: .5rem; }
  .chain span::after { content: "\\A"; white-space: pre; }
  .chain span:last-child::after { content: none; }
}
@media (max-width: 40rem) {
  body { font-size: 15px; }
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.6rem; }
  h2 { margin-top: 2.5rem; }
  th, td { padding-right: .9rem; }
  th:first-child { position: sticky; left: 0; background: var(--paper); }
  .acc { min-width: 7.5rem; }
  .narrow table { width: 100%; }
}
@media print { .sample, figure, tr { break-inside: avoid; } }
"""
