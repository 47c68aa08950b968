"""Numbers with units, and outside text cut and escaped. Model output is untrusted: it goes through `visible` first."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

NONE = "–"

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_DIRECTION = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], 0xFFFD)


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 1 as `61.5 %`; a dash for None."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def interval(low: float | None, high: float | None) -> str:
    """An interval of shares as `54.7 to 67.9 %`."""
    return NONE if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f} %"


def points(difference: float) -> str:
    """A difference of shares in percentage points with its sign: `+3.5 points`."""
    return f"{_signed(difference)} points"


def point_interval(low: float, high: float) -> str:
    """An interval of differences: `+1.5 to +5.5 points`."""
    return f"{_signed(low)} to {points(high)}"


def _signed(difference: float) -> str:
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def count(number: int | None, unit: str = "") -> str:
    """An integer with thousands separators: `200,448 tokens`."""
    if number is None:
        return NONE
    return f"{number:,} {unit}".rstrip()


def plural(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_count(number: float) -> str:
    """A count for a plot's axis: `950`, `50 k`, `1.2 M`."""
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def size(n_bytes: int) -> str:
    """Bytes in decimal units: `12.3 kB`."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= power:
            return f"{n_bytes / power:.1f} {unit}"
    return f"{n_bytes} B"


def decimal(value: float | None) -> str:
    """A reward, advantage or other bare number: two decimals."""
    return NONE if value is None else f"{value:.2f}".replace("-0.00", "0.00")


def visible(text: str) -> str:
    """`text` with control characters and direction overrides replaced by visible signs: it cannot disguise itself."""
    return text.translate(_CONTROLS).translate(_DIRECTION)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, then how many more there are."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def cut_start(text: str, limit: int) -> str:
    """The last `limit` characters of `text`, after how many were left out. For a prefix, whose end matters."""
    if len(text) <= limit:
        return text
    return f"({len(text) - limit:,} characters before) …{text[-limit:]}"


def plot_text(text: str) -> str:
    """`text` for a picture: nothing in it is mathematical notation."""
    return cut(visible(text), 60).replace("\\", "\\\\").replace("$", r"\$")


def html_text(text: str) -> str:
    """`text` for the inside of an HTML element or a quoted attribute."""
    return escape(visible(text), quote=True)


def markdown_cell(text: str) -> str:
    """`text` for a Markdown table cell or a line: nothing in it is markup, no line ends."""
    text = escape(" ".join(visible(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", text)


def markdown_block(text: str) -> str:
    """`text` as a fenced code block that it cannot leave: the fence is longer than any run of backticks inside."""
    text = visible(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A GFM table of ready cells; `right` names the columns set flush right."""
    rule = ["---:" if i in right else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def mermaid_label(text: str) -> str:
    """`text` for a quoted mermaid label."""
    return re.sub(r"[^\w .,:;+%()/=–-]", " ", " ".join(text.split()))


def flatten(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value) rows; lists of plain values stay on one row."""
    if not values and not prefix:
        return []
    if isinstance(values, dict) and values:
        return [
            row for key, value in values.items() for row in flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(values, (list, tuple)) and any(isinstance(value, dict) for value in values):
        return [row for i, value in enumerate(values) for row in flatten(value, f"{prefix}.{i}")]
    return [(prefix, values if isinstance(values, str) else json.dumps(values, ensure_ascii=False, default=str))]


def redacted(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """`rows` with the user and password of URLs left out: a report is passed on."""
    return [(name, re.sub(r"://[^/@\s\"']+@", "://…@", value)) for name, value in rows]
