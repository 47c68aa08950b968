"""report.html: one file with inline style and pictures. It holds no script, and its policy lets a browser run none."""

import base64
from collections.abc import Iterable, Sequence

from data.report.composition import SHOWN_SHARES, Importance, concentration_note, overlap_note, source_rows
from data.report.content import Content, column_title
from data.report.lineage import chain
from data.report.meta_actions import alarm_rows, attempt_rows, figure_rows
from data.report.plots import Picture
from data.report.style import CSS
from data.report.summary import SummaryRow
from data.report.text import (
    count,
    cut,
    cut_start,
    flatten,
    html_text,
    interval,
    percent,
    plural,
    point_interval,
    points,
    redacted,
    size,
)
from data.report.training import Sample, checkpoint_rows, sample_facts, sample_verdict

QUESTION_LIMIT, PREFIX_LIMIT, COMPLETION_LIMIT, CELL_LIMIT = 1200, 1200, 1600, 400  # characters

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def data_uri(png: bytes) -> str:
    """PNG bytes as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _absent(text: str) -> str:
    return f'<p class="absent">{html_text(text)}</p>'


def _note(text: str) -> str:
    return f'<p class="note">{html_text(text)}</p>'


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), narrow: bool = False
) -> str:
    """A table of ready cells; `right` names the columns of numbers; the first column heads its row."""
    kinds = [' class="n"' if i in right else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{kind}>{html_text(name)}</th>' for name, kind in zip(header, kinds))
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(rest, kinds[1:]))
        + "</tr>"
        for first, *rest in rows
    )
    kind = "scroll narrow" if narrow else "scroll"
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figures(pictures: Sequence[Picture]) -> str:
    def one(picture: Picture) -> str:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{data_uri(picture.dark)}">'
        image = f'<img src="{data_uri(picture.light)}" alt="{html_text(picture.alt)}">'
        return f"<figure><picture>{dark}{image}</picture></figure>"

    return f'<div class="figures">{"".join(map(one, pictures))}</div>' if pictures else ""


def _lineage(content: Content) -> str:
    links = []
    for nodes in chain(content):
        inner = "".join(f"<b>{html_text(node.title)}</b><span>{html_text(node.detail)}</span>" for node in nodes)
        links.append(f"<li>{inner}</li>")
    return f'<ol class="chain">{"".join(links)}</ol>' if links else ""


def _accuracy_cell(row: SummaryRow | None) -> str:
    if row is None:
        return '<td class="acc"><small>not evaluated</small></td>'
    left, width = 100 * row.low, 100 * (row.high - row.low)
    bar = (
        f'<span class="bar" aria-hidden="true"><i style="left:{left:.1f}%;width:{width:.1f}%"></i>'
        f'<b style="left:{100 * row.accuracy:.1f}%"></b></span>'
    )
    return (
        f'<td class="acc"><strong>{percent(row.accuracy)}</strong> '
        f"{bar}<small>{interval(row.low, row.high)}</small></td>"
    )


def _accuracy_table(content: Content) -> str:
    columns = content.columns
    head = "".join(
        f'<th scope="col">{html_text(column_title(column, columns))}<br><small>'
        f"{plural(max(row.n for row in content.summary if row.column == column), 'question')}</small></th>"
        for column in columns
    )
    body = []
    for model in content.models:
        rows = "".join(_accuracy_cell(content.cell(model, column)) for column in columns)
        label = '<br><span class="tag">one seed</span>' if content.seeds.get(model) == 1 else ""
        tokens = count(content.spent(model))
        body.append(f'<tr><th scope="row">{html_text(model)}{label}</th>{rows}<td class="n">{tokens}</td></tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">model</th>{head}'
        f'<th scope="col" class="n">generated<br>tokens</th></tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _accuracy(content: Content) -> str:
    if not content.summary:
        return _absent("No evaluation was made in this run.")
    level = f"{100 * content.request.confidence:.3g} %"
    label = ". ".join(text.capitalize() for text in content.caveats)
    parts = [
        _note(
            f"Answers from the question alone. The bar is the {level} interval over questions. Generated tokens are "
            f"those sampled in training, over all tasks.{' ' + label + '.' if label else ''}"
        ),
        _accuracy_table(content),
    ]
    if content.differences:
        first = content.differences[0]
        rows = [
            (
                html_text(column_title((d.task, d.benchmark, d.split), content.columns)),
                points(d.mean),
                point_interval(d.low, d.high),
                count(d.n),
            )
            for d in content.differences
        ]
        parts.append(f"<h3>{html_text(first.model)} minus {html_text(first.reference)}</h3>")
        header = ("task", "difference", f"{level} interval (paired)", "questions")
        parts.append(_table(header, rows, (1, 2, 3), narrow=True))
    rows = [
        (
            html_text(row.model),
            html_text(column_title(row.column, content.columns)),
            f"{count(row.correct)} of {count(row.answers)}",
            count(row.generated_tokens),
            percent(row.truncated_share),
            percent(row.no_answer_share),
        )
        for row in content.summary
    ]
    header = ("model", "task", "correct answers", "generated tokens", "cut at the length limit", "no readable answer")
    parts.append(f"<details><summary>Counts</summary>{_table(header, rows, (2, 3, 4, 5))}</details>")
    return "".join(parts)


def _curves(content: Content, pictures: Sequence[Picture]) -> str:
    chosen = [picture for picture in pictures if picture.section == "curves"]
    if not chosen:
        return _absent("No learning curves: this run trained no expert by reinforcement learning.")
    text = (
        "Each arm against the tokens it has sampled so far. A ring marks the checkpoint chosen on validation. Rewards: "
        "every round pale, the running mean strong."
    )
    return _note(text) + _figures(chosen) + _checkpoints(content)


def _checkpoints(content: Content) -> str:
    if not content.training.checkpoints:
        return ""
    header, rows = checkpoint_rows(content.training)
    table = _table(header, [[html_text(cell) for cell in row] for row in rows], range(1, len(header)))
    return f"<h3>Chosen checkpoints</h3>{_note('Validation accuracies. Nothing is chosen on test questions.')}{table}"


def _stages(content: Content, pictures: Sequence[Picture]) -> str:
    chosen = [picture for picture in pictures if picture.section == "stages"]
    if not chosen:
        return _absent("No success by stage: there are no rollouts by stage in the metrics.")
    rows = [
        (
            f"{html_text(cell.task)}, {html_text(cell.arm)}",
            str(stage),
            percent(cell.early.get(stage)),
            percent(cell.late.get(stage)),
        )
        for cell in content.training.stages
        for stage in sorted({*cell.early, *cell.late})
    ]
    rounds = max(cell.rounds for cell in content.training.stages)
    table = _table(("expert", "stage", "early", "late"), rows, (1, 2, 3))
    text = (
        "Share of sampled completions that are right, by start state. Hollow: the first third of the rounds "
        f"({plural(rounds, 'round')} at most); filled: the last third."
    )
    return _note(text) + _figures(chosen) + f"<details><summary>Figures by stage</summary>{table}</details>"


def _meta_actions(content: Content, pictures: Sequence[Picture]) -> str:
    chosen = [picture for picture in pictures if picture.section == "meta_actions"]
    text = (
        "Behaviour of the rollouts that start at the question. The last panel: of 100 blocks of a kind, which block "
        "followed how often in the last third of the rounds."
    )
    parts = [_note(text), _figures(chosen)]
    tables = [("First and last attempts at the test questions", attempt_rows(content.attempts), range(2, 7))]
    tables.append(("Alarms", alarm_rows(content.meta), (2, 3)))
    tables.append(("Figures late in training", figure_rows(content.meta), range(1, len(content.meta) + 1)))
    for title, (header, rows), numbers in tables:
        shown = [[html_text(cell) for cell in row] for row in rows]
        body = _table([html_text(name) for name in header], shown, numbers) if rows else _note("None.")
        parts.append(f"<h3>{title}</h3>{body}")
    return "".join(parts)


def _sample(sample: Sample) -> str:
    good = "good" if sample.correct else "bad"
    facts = [*sample_facts(sample), "cut at the length limit" if sample.stop_reason == "length" else ""]
    header = "".join(f"<span>{html_text(fact)}</span>" for fact in facts if fact)
    prefix = html_text(cut_start(sample.prefix, PREFIX_LIMIT))
    marked = f"<mark>{prefix}</mark>" if prefix else ""
    return (
        f'<article class="sample"><header><b>{html_text(sample.arm)}</b>'
        f'<span class="tag {good}">{html_text(sample_verdict(sample))}</span>{header}</header>'
        f"<p>{html_text(cut(sample.question, QUESTION_LIMIT))}</p>"
        f"<pre>{marked}{html_text(cut(sample.completion, COMPLETION_LIMIT))}</pre></article>"
    )


def _samples(content: Content) -> str:
    if not content.samples:
        return _absent("No samples: this run kept no rollouts.")
    parts = []
    for task in dict.fromkeys(sample.task for sample in content.samples):
        chosen = [sample for sample in content.samples if sample.task == task]
        inner = "".join(map(_sample, chosen))
        opened = "" if parts else " open"
        title = f"{html_text(task)}: {plural(len(chosen), 'sample')}"
        parts.append(f"<details{opened}><summary>{title}</summary>{inner}</details>")
    text = "Rollouts of a round. The marked part was revealed from a demonstration; the policy wrote the rest."
    return _note(text) + "".join(parts)


def _importance(importance: Importance | None, pictures: Sequence[Picture]) -> str:
    if importance is None:
        return _absent("No composition was made in this run.")
    shares = [
        (html_text(t.task), *(percent(t.within(share)) for share in SHOWN_SHARES), count(t.on))
        for t in importance.tasks
    ]
    header = ("task", *(f"top {100 * share:.3g} %" for share in SHOWN_SHARES), "ranks gated on")
    names = [task.task for task in importance.tasks]
    overlap = [(html_text(a), *(f"{importance.overlap[a, b]:.2f}" for b in names)) for a in names]
    sources, shares_by_source = source_rows(importance)
    origins = [[html_text(cell) for cell in row] for row in shares_by_source]
    columns = range(1, max(len(header), len(names) + 1))
    return (
        _note(concentration_note(importance))
        + _figures([picture for picture in pictures if picture.section == "importance"])
        + _table(header, shares, columns)
        + "<h3>Whose ranks a task uses</h3>"
        + _note("Share of the task's importance in the ranks that came from each expert.")
        + _table(("task", *sources), origins, columns, narrow=True)
        + "<h3>Overlap between tasks</h3>"
        + _note(overlap_note(importance))
        + _table(("task", *names), overlap, columns, narrow=True)
    )


def _rejected(content: Content) -> str:
    if not content.ingested:
        return _absent("No ingestion is part of this report.")
    counts = [
        (
            html_text(task.task),
            count(sum(task.accepted.values()) + task.rejected),
            count(sum(task.accepted.values())),
            count(task.rejected),
            html_text(", ".join(f"{split} {count(n)}" for split, n in task.accepted.items())),
            html_text(", ".join(f"{split} {count(n)}" for split, n in task.questions.items())),
        )
        for task in content.ingested
    ]
    parts = [_table(("task", "read", "accepted", "rejected", "accepted by split", "questions"), counts, (1, 2, 3))]
    if content.rejections:
        rows = [
            (html_text(r.task), html_text(r.reason), count(r.rows), html_text(cut(r.message, CELL_LIMIT)))
            for r in content.rejections
        ]
        parts.append(_table(("task", "reason", "rows", "for example"), rows, (2,)))
    else:
        parts.append(_note("No row was rejected."))
    return "".join(parts)


def _settings(content: Content) -> str:
    rows = [
        (
            f'<span class="code">{html_text(name)}</span>',
            f'<span class="code">{html_text(cut(value, CELL_LIMIT))}</span>',
        )
        for name, value in redacted(flatten(content.request.settings))
    ]
    if not rows:
        return _absent("The settings are not part of this report.")
    return f"<details><summary>{plural(len(rows), 'setting')}</summary>{_table(('setting', 'value'), rows)}</details>"


def _files(content: Content) -> str:
    if not content.files:
        return _absent("This report was made from no files.")
    rows = [
        (
            f'<span class="code">{html_text(entry.name)}</span>',
            count(entry.rows),
            size(entry.n_bytes),
            f'<code title="{entry.sha256}">{entry.sha256[:16]}</code>',
        )
        for entry in content.files
    ]
    table = _table(("file", "rows", "size", "SHA-256 (first 16 digits)"), rows, (1, 2))
    return f"<details><summary>{plural(len(rows), 'file')}</summary>{table}</details>"


def render(content: Content, pictures: Sequence[Picture]) -> str:
    """The whole page. All text from outside is escaped and cut."""
    sections = [
        ("accuracy", "Accuracy", _accuracy(content)),
        ("curves", "Learning curves", _curves(content, pictures)),
        ("stages", "Success by stage", _stages(content, pictures)),
        *([("actions", "Meta-actions", _meta_actions(content, pictures))] if content.meta else []),
        ("samples", "Samples", _samples(content)),
        ("ranks", "Rank importance", _importance(content.importance, pictures)),
        ("rows", "Rows read and rejected", _rejected(content)),
        ("settings", "Settings", _settings(content)),
        ("files", "Files", _files(content)),
    ]
    title = html_text(content.request.run_name)
    versions = ", ".join(
        f"{html_text(name)} {html_text(text)}" for name, text in sorted(content.request.versions.items())
    )
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{name}</h2>{text}</section>' for key, name, text in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">'
        f"<title>{title}: report</title><style>{CSS}</style></head><body><main>"
        f'<p class="eyebrow">Ratchet run report</p><h1>{title}</h1><p class="verdict">{html_text(content.verdict)}</p>'
        f"{_lineage(content)}<nav>{links}</nav>{body}<footer>{versions or 'Library versions not recorded.'}</footer>"
        "</main></body></html>\n"
    )
