"""The step `ingest`: demonstrations from any source to checked, cut and split tables.

Rows stream through: each is read, checked and cut, and goes to a spill file; what is kept of it are hashes. A second
pass over the spill file, by columns, decides splits and the limit, which depend on all rows.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.artifacts import TableWriter, write_table
from data.errors import UserError
from data.ingestion.intake import Intake
from data.ingestion.overlap import Overlap
from data.ingestion.sources import Stream, demonstration_stream
from data.ingestion.splitting import assign
from data.progress import Report
from data.settings import AnswerKind, BenchmarkSource, Segmentation, Source, Splits

_TABLES = ("demonstrations.parquet", "rejected.parquet", "questions.parquet")
_SPILL = ".spill.arrow"
_PROGRESS_EVERY = 2048


def ingest(
    source: Source,
    task: str,
    out: Path,
    *,
    splits: Splits,
    segmentation: Segmentation | None,
    answer_kind: AnswerKind | None,
    test: BenchmarkSource | None,
    report: Report,
) -> dict[str, Any]:
    """Writes `out`/demonstrations.parquet, rejected.parquet and questions.parquet for one task.

    segmentation: None means the unit that the suite names, or R³'s for the recognised format. answer_kind: overrides
    what the source implies. test: its questions become the test questions, and demonstrations that overlap with them
    are refused; without it test questions are held out of the demonstrations like those of validation and promotion.
    Held-out questions are chosen by content hash, so a question's repeats are all on one side.

    Returns counts: `read` = `accepted` + `rejected`, `rejected_by_reason`, demonstrations by split (`splits`),
    questions by split (`questions`), `format`, and `contaminated_kept`. Raises UserError where the source cannot be
    read, no row is accepted, or too few questions are left for training. On any error the tables are removed.
    """
    questions = _benchmark_questions(test, task, report)
    overlap = _overlap(test, task)
    limit = None if source.kind == "suite" else source.limit
    held_out = {"validation": splits.validation, "promotion": splits.promotion}
    held_out["test"] = 0 if test is not None else splits.test
    try:
        with TableWriter(out / "rejected.parquet", "rejected") as rejected:
            stream = demonstration_stream(source, segmentation, sum(held_out.values()))
            with Intake(task, stream, answer_kind, out / _SPILL, rejected, overlap, limit) as intake:
                _read_all(intake, stream, report)
            if not intake.accepted:
                raise UserError(_nothing_accepted(stream.name, intake))
            counts = assign(out / _SPILL, out / _TABLES[0], rejected, held_out, limit, stream.name)
            if counts.over_limit:
                intake.rejected["over_limit"] = counts.over_limit
        write_table(out / "questions.parquet", "questions", [*counts.questions, *questions])
    except BaseException:
        for name in _TABLES:
            (out / name).unlink(missing_ok=True)
        raise
    finally:
        (out / _SPILL).unlink(missing_ok=True)
    result = {
        "read": intake.read,
        "accepted": counts.accepted,
        "rejected": sum(intake.rejected.values()),
        "rejected_by_reason": dict(sorted(intake.rejected.items())),
        "splits": counts.splits,
        "questions": dict(Counter(row["split"] for row in [*counts.questions, *questions])),
        "format": stream.format,
        "contaminated_kept": intake.contaminated_kept,
    }
    report.log(_summary(stream.name, result))
    return result


def _benchmark_questions(test: BenchmarkSource | None, task: str, report: Report) -> list[dict[str, Any]]:
    if test is None:
        return []
    from data.benchmarks import questions

    rows = questions(test, task)
    report.log(f"{len(rows)} test questions from {test.name}")
    return rows


def _overlap(test: BenchmarkSource | None, task: str) -> Overlap | None:
    """Over all questions of the benchmark, also where only some of them are asked."""
    if test is None:
        return None
    from data.benchmarks import questions

    everything = questions(test.model_copy(update={"limit": None}), task)
    return Overlap(everything, test.name, test.decontaminate, test.overlap_threshold)


def _read_all(intake: Intake, stream: Stream, report: Report) -> None:
    for row in _counted(stream, report):
        intake.take(row)


def _counted(stream: Stream, report: Report) -> Iterator[Any]:
    for count, row in enumerate(stream.rows, start=1):
        yield row
        if count % _PROGRESS_EVERY == 0:
            done, total = stream.progress()
            report.progress(done, total, f"{count} rows of {stream.name}")


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))


def _nothing_accepted(name: str, intake: Intake) -> str:
    if not intake.read:
        return f"{name} holds no rows; give a file with demonstrations"
    first = intake.first_refusal
    return (
        f"{name}: none of {intake.read} rows was accepted ({_reasons(intake.rejected)}); "
        f"row {first[0]}: {first[1]}; check source.format, source.columns and answer_kind"
    )


def _summary(name: str, result: dict[str, Any]) -> str:
    reasons = f" ({_reasons(result['rejected_by_reason'])})" if result["rejected"] else ""
    splits = ", ".join(f"{split} {count}" for split, count in result["splits"].items())
    accepted = f"{result['accepted']} accepted ({splits})"
    return f"{name}: {result['read']} rows read, {accepted}, {result['rejected']} refused{reasons}"
