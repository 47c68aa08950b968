"""Grades a file of answers: columns prediction, gold and kind, as CSV, JSON lines or Parquet."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data.errors import UserError
from data.grading.grader import KINDS, grade

_COLUMNS = ("prediction", "gold")
_LONGEST_FIELD = 64 << 20


def grade_file(path: str | Path, out: str | Path | None = None) -> dict:
    """Grades every row of a file, prints a summary and gives it: rows, correct, accuracy, and counts by kind and
    reason.

    `path` ends in .csv, .jsonl, .json (JSON lines) or .parquet and has the columns prediction, gold and, optionally,
    kind ("number" where it is missing or empty). `out`, of the same endings, gets every row with correct, parsed and
    reason; it is replaced whole or not at all. UserError for a file, row or kind that cannot be graded.
    """
    source = Path(path)
    rows = [_graded(row, number) for number, row in enumerate(_rows(source), start=1)]
    if not rows:
        raise UserError(f"{source} holds no rows: give a file with the columns prediction, gold and kind")
    if out is not None:
        _write(rows, Path(out))
    summary = _summary(rows)
    print(_summary_text(source, summary))
    return summary


def _rows(source: Path) -> Iterator[dict]:
    if not source.is_file():
        raise UserError(f"{source} is no file: name a CSV, JSON lines or Parquet file")
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    reader = readers.get(source.suffix.lower())
    if reader is None:
        raise UserError(f"{source}: the ending {source.suffix!r} is not known; use {', '.join(readers)}")
    try:
        yield from reader(source)
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 ({error.reason} at byte {error.start}): convert it first") from error


def _csv_rows(source: Path) -> Iterator[dict]:
    csv.field_size_limit(_LONGEST_FIELD)
    with source.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        try:
            yield from reader
        except csv.Error as error:
            raise UserError(f"{source}, line {reader.line_num}: {error}; is it a CSV file?") from error


def _json_rows(source: Path) -> Iterator[dict]:
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{source}, line {number} is not JSON ({error}): give one object a line") from error
            if not isinstance(row, dict):
                raise UserError(f"{source}, line {number} is not an object: give one object a line, not an array")
            yield row


def _parquet_rows(source: Path) -> Iterator[dict]:
    import pyarrow.parquet
    from pyarrow import ArrowInvalid

    try:
        file = pyarrow.parquet.ParquetFile(source)
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise UserError(f"{source} is not a Parquet file ({error})") from error


def _graded(row: dict, number: int) -> dict:
    for name in _COLUMNS:
        if name not in row:
            raise UserError(f"row {number} has no column {name!r}: name the columns prediction, gold and kind")
    kind = row.get("kind") or "number"
    if kind not in KINDS:
        raise UserError(f"row {number}: kind {kind!r} is not known; use one of {', '.join(KINDS)}")
    result = grade(_text(row["prediction"], "prediction", number), _text(row["gold"], "gold", number), kind)
    return row | {"kind": kind, "correct": result.correct, "parsed": result.parsed, "reason": result.reason}


def _text(value: object, name: str, number: int) -> str:
    """Numbers and truth values stand as their text; nothing is the empty text."""
    if value is None:
        return ""
    if isinstance(value, str | bool | int | float):
        return str(value)
    raise UserError(f"row {number}: {name} is {type(value).__name__}, not text: write it as text")


def _write(rows: list[dict], target: Path) -> None:
    """Writes beside the target, then renames: a reader sees the old file or the whole new one."""
    writers = {".csv": _write_csv, ".jsonl": _write_json, ".json": _write_json, ".parquet": _write_parquet}
    writer = writers.get(target.suffix.lower())
    if writer is None:
        raise UserError(f"{target}: the ending {target.suffix!r} is not known; use {', '.join(writers)}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        writer(rows, part)
        part.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _write_csv(rows: list[dict], part: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row if name is not None))
    with part.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _write_json(rows: list[dict], part: Path) -> None:
    with part.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps({str(name): value for name, value in row.items()}) + "\n")


def _write_parquet(rows: list[dict], part: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    columns |= {name: [None if value is None else str(value) for value in columns[name]] for name in _COLUMNS}
    pyarrow.parquet.write_table(pyarrow.table(columns), part, compression="zstd")


def _summary(rows: list[dict]) -> dict:
    correct = sum(row["correct"] for row in rows)
    kinds = {
        kind: {
            "rows": sum(row["kind"] == kind for row in rows),
            "correct": sum(row["kind"] == kind and row["correct"] for row in rows),
        }
        for kind in sorted({row["kind"] for row in rows})
    }
    reasons = Counter(row["reason"].partition(":")[0] for row in rows)
    return {
        "rows": len(rows),
        "correct": correct,
        "accuracy": correct / len(rows),
        "kinds": kinds,
        "reasons": dict(reasons.most_common()),
    }


def _summary_text(source: Path, summary: dict) -> str:
    lines = [f"{source}: {summary['correct']} of {summary['rows']} correct ({100 * summary['accuracy']:.1f} %)"]
    lines += [f"  {kind}: {counts['correct']} of {counts['rows']}" for kind, counts in summary["kinds"].items()]
    lines.append("  reasons: " + ", ".join(f"{reason} {count}" for reason, count in summary["reasons"].items()))
    return "\n".join(lines)
