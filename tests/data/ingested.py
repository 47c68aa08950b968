"""Helpers of the ingestion tests: small files in published layouts, and one call of the step."""

import json
from pathlib import Path
from typing import Any

from data.artifacts import read_rows
from data.ingestion import ingest
from data.progress import Silent
from data.settings import FileSource, Splits

FEW = Splits(validation=1, promotion=0, test=1)


def gsm8k_rows(n: int, start: int = 0) -> list[dict[str, str]]:
    """Rows in GSM8K's layout, of our own making."""
    return [
        {
            "question": f"Ada has {number} pens and buys {number + 2} more. How many pens does she have?",
            "answer": f"She had {number} pens.\n"
            f"She has {number}+{number + 2}=<<{number}+{number + 2}={2 * number + 2}>>{2 * number + 2} pens.\n"
            f"#### {2 * number + 2:,}",
        }
        for number in range(start, start + n)
    ]


def json_lines(rows: list[dict[str, Any]]) -> str:
    """`rows` as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def run(
    path: Path | str, out: Path, *, splits: Splits = FEW, segmentation=None, answer_kind=None, test=None, **source
) -> dict:
    """One call of `ingest` on the file at `path`; `out` is made, and emptied first where it exists."""
    out.mkdir(exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    return ingest(
        FileSource(path=str(path), **source),
        "task",
        out,
        splits=splits,
        segmentation=segmentation,
        answer_kind=answer_kind,
        test=test,
        report=Silent(),
    )


def tables(out: Path) -> tuple[list[dict], list[dict], list[dict]]:
    """(demonstrations, rejected, questions) that `ingest` wrote."""
    return tuple(read_rows(out / f"{name}.parquet", name) for name in ("demonstrations", "rejected", "questions"))
