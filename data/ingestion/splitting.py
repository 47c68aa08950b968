"""The second pass: which questions are held out, and which rows the limit keeps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.artifacts import SCHEMAS, TableWriter
from data.errors import UserError

_BATCHES_PER_GROUP = 16


@dataclass
class Assigned:
    """What the second pass decided: demonstrations by split, the held-out questions, rows beyond the limit."""

    accepted: int
    over_limit: int
    splits: dict[str, int]
    questions: list[dict[str, Any]]
    """Rows of the table questions, each question once."""


def assign(
    spill: Path, path: Path, rejected: TableWriter, held_out: dict[str, int], limit: int | None, name: str
) -> Assigned:
    """Writes the table demonstrations to `path` from the spill file, in its order.

    The `limit` rows with the smallest content hashes are kept. Of their distinct questions those with the smallest
    hashes are held out: first validation, then promotion, then test. Raises UserError where none is left for training.
    """
    item_hashes = _column(spill, "item_hash")
    keep = np.ones(len(item_hashes), dtype=bool)
    if limit is not None and limit < len(item_hashes):
        keep = item_hashes <= np.partition(item_hashes, limit - 1)[limit - 1]
    del item_hashes
    split_of = _held_out_hashes(_distinct(_column(spill, "question_hash")[keep]), held_out, name)
    with pa.OSFile(str(spill)) as file:
        return _write(pa.ipc.open_file(file), keep, split_of, path, rejected)


def _column(spill: Path, name: str) -> np.ndarray:
    """One column of the spill file, without reading the others."""
    with pa.OSFile(str(spill)) as file:
        schema = pa.ipc.open_file(file).schema
    with pa.OSFile(str(spill)) as file:
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name)])
        reader = pa.ipc.open_file(file, options=options)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        return np.concatenate([batch.column(0).to_numpy() for batch in batches])


def _distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values in order, sorted in place: np.unique takes ten times the memory."""
    values.sort()
    return values[np.concatenate([[True], values[1:] != values[:-1]])]


def _held_out_hashes(distinct: np.ndarray, held_out: dict[str, int], name: str) -> dict[int, str]:
    wanted = sum(held_out.values())
    if len(distinct) <= wanted:
        asked = ", ".join(f"splits.{split} {n}" for split, n in held_out.items() if n)
        raise UserError(
            f"{name}: {len(distinct)} distinct questions were accepted, but {wanted} are to be held out ({asked}) "
            "and at least one is needed for training; lower these numbers or give more demonstrations"
        )
    names = [split for split, n in held_out.items() for _ in range(n)]
    return dict(zip(distinct[:wanted].tolist(), names))


def _write(
    reader: pa.RecordBatchFileReader, keep: np.ndarray, split_of: dict[int, str], path: Path, rejected: TableWriter
) -> Assigned:
    counts = Assigned(0, 0, {"train": 0} | dict.fromkeys(split_of.values(), 0), [])
    asked: set[int] = set()
    start = 0
    with TableWriter(path, "demonstrations") as writer:
        for first in range(0, reader.num_record_batches, _BATCHES_PER_GROUP):
            numbers = range(first, min(first + _BATCHES_PER_GROUP, reader.num_record_batches))
            batch = pa.Table.from_batches([reader.get_batch(number) for number in numbers])
            kept = keep[start : start + batch.num_rows]
            start += batch.num_rows
            if not kept.all():
                beyond = batch.filter(pa.array(~kept))
                rejected.write(_over_limit(beyond))
                counts.over_limit += beyond.num_rows
                batch = batch.filter(pa.array(kept))
            hashes = batch["question_hash"].to_pylist()
            names = [split_of.get(value, "train") for value in hashes]
            for split in names:
                counts.splits[split] += 1
            writer.write(batch.append_column("split", pa.array(names, pa.string())))
            for place, (value, split) in enumerate(zip(hashes, names)):
                if split != "train" and value not in asked:
                    asked.add(value)
                    counts.questions.append(_question(batch.slice(place, 1).to_pylist()[0], split))
        counts.accepted = writer.rows
    counts.questions.sort(key=lambda row: (list(counts.splits).index(row["split"]), row["item_id"]))
    return counts


def _over_limit(rows: pa.Table) -> pa.Table:
    n = rows.num_rows
    return pa.table(
        {
            "source": rows["source"],
            "row_number": rows["row_number"],
            "reason": pa.array(["over_limit"] * n, pa.string()),
            "message": pa.array(["accepted, but beyond source.limit, which keeps the smallest content hashes"] * n),
            "raw": rows["raw"],
        },
        schema=SCHEMAS["rejected"],
    )


def _question(row: dict[str, Any], split: str) -> dict[str, Any]:
    return {
        "task": row["task"],
        "benchmark": row["source"],
        "item_id": row["item_id"],
        "question": row["question"],
        "gold": row["answer"],
        "answer_kind": row["answer_kind"],
        "subject": "",
        "split": split,
    }
