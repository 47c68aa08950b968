"""The states inside a demonstration that rollouts start from (R³'s reverse curriculum)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data.artifacts import TableWriter, stable_hash
from data.errors import UserError
from data.progress import Report
from data.settings import AdaptiveCurriculum, Curriculum, MixedCurriculum, NoCurriculum

_BATCH = 1024
ADAPTIVE_STAGES = 5
"""Stages under which the cut points of the adaptive curriculum are counted, to be compared with R³'s (our choice)."""
_COLUMNS = ["item_id", "task", "question", "response", "steps", "answer", "answer_kind", "split"]


def revealed_steps(n_steps: int, n_stages: int) -> list[int]:
    """How many steps of an `n_steps`-step demonstration each of `n_stages` stages reveals: [k_0, ..., k_(M-1)].

    k_i = min(N - 1, round(i N / M)), as recovered from R³'s published data. Stage 0 starts from the question; the last
    step is never revealed. A tie of `round` (none at M = 5) goes to the even number, as Python rounds (our choice).
    Raises ValueError for a demonstration without steps or a curriculum without stages.
    """
    if n_steps < 1 or n_stages < 1:
        raise ValueError(f"n_steps is {n_steps} and n_stages is {n_stages}; both must be at least 1")
    return [min(n_steps - 1, round(stage * n_steps / n_stages)) for stage in range(n_stages)]


def cuts(n_steps: int, curriculum: Curriculum) -> list[tuple[int, int]]:
    """(stage, revealed steps) of each start state of an `n_steps`-step demonstration.

    The adaptive curriculum may cut before every step; its stage is R³'s nearest, and 0 for the question alone.
    """
    if isinstance(curriculum, AdaptiveCurriculum):
        last = ADAPTIVE_STAGES - 1
        return [(0, 0)] + [(min(last, max(1, round(ADAPTIVE_STAGES * k / n_steps))), k) for k in range(1, n_steps)]
    n_stages = 1 if isinstance(curriculum, NoCurriculum) else curriculum.n_stages
    found = list(enumerate(revealed_steps(n_steps, n_stages)))
    if isinstance(curriculum, MixedCurriculum) and curriculum.unique:
        return list({k: (stage, k) for stage, k in reversed(found)}.values())[::-1]
    return found


def build(demonstrations: Path, curriculum: Curriculum, out: Path, report: Report) -> dict[str, Any]:
    """Writes `out`/start_states.parquet for the training split of `demonstrations` (a demonstrations.parquet).

    One row per demonstration and stage; `prefix + remainder == response`, byte for byte. Without a curriculum there is
    stage 0 only, for the adaptive one a row for every step. Short demonstrations collapse several stages to one start
    state: kept (published), or only the lowest of them where `curriculum.unique`.
    Returns counts: rows, demonstrations, and rows with an empty prefix.
    Raises UserError where no demonstration is in the training split.
    """
    counts = {"demonstrations": 0, "rows": 0, "from_question": 0}
    table = pq.ParquetFile(demonstrations)
    path = out / "start_states.parquet"
    read = 0
    with TableWriter(path, "start_states") as writer:
        for batch in table.iter_batches(_BATCH, columns=_COLUMNS):
            rows = []
            for row in batch.to_pylist():
                if row["split"] == "train":
                    counts["demonstrations"] += 1
                    rows.extend(_states(row, curriculum))
            counts["from_question"] += sum(not row["prefix"] for row in rows)
            writer.write(rows)
            read += batch.num_rows
            report.progress(read, table.metadata.num_rows, "demonstrations cut")
        counts["rows"] = writer.rows
    if not counts["rows"]:
        path.unlink()
        raise UserError(
            f"{demonstrations} holds no demonstration in the training split; lower splits.* or add demonstrations"
        )
    report.log(f"{counts['rows']} start states from {counts['demonstrations']} demonstrations")
    return counts


def _states(row: dict[str, Any], curriculum: Curriculum) -> Iterator[dict[str, Any]]:
    steps, response = row["steps"], row["response"]
    if not response.startswith("".join(steps)):
        raise ValueError(
            f"demonstration {row['item_id']}: its steps are not the beginning of its response; ingest it again"
        )
    adaptive = isinstance(curriculum, AdaptiveCurriculum)
    n_stages = ADAPTIVE_STAGES if adaptive else getattr(curriculum, "n_stages", 1)
    for stage, revealed in cuts(len(steps), curriculum):
        identity = ("revealed", revealed) if adaptive else (stage,)
        prefix = "".join(steps[:revealed])
        yield {
            "item_id": row["item_id"],
            "start_state_id": stable_hash(row["item_id"], *identity)[:32],
            "task": row["task"],
            "stage": stage,
            "n_stages": n_stages,
            "revealed_steps": revealed,
            "total_steps": len(steps),
            "question": row["question"],
            "prefix": prefix,
            "remainder": response[len(prefix) :],
            "answer": row["answer"],
            "answer_kind": row["answer_kind"],
        }
