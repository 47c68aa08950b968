"""What a benchmark is: where its rows come from, how a row reads as a question with a gold, how it is graded."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from data.artifacts import stable_hash
from data.benchmarks.files import file_rows
from data.errors import UserError
from data.settings import AnswerKind, BenchmarkSource

Row = Mapping[str, Any]
Metric = Literal["accuracy", "avg@k"]


@dataclass(frozen=True)
class Hub:
    """Where the `datasets` library finds a benchmark."""

    name: str
    config: str | None = None
    split: str = "test"
    revision: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the split, downloaded by `datasets`. Raises UserError where the hub has them not."""
        import datasets  # takes seconds to import, and only this path needs it

        try:
            found = datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except (ValueError, FileNotFoundError) as error:
            raise UserError(
                f"benchmark from the hub: {self.name!r} (config {self.config}, split {self.split}) cannot be loaded: "
                f"{error}; give the path of a file instead"
            ) from None
        for row in found:
            yield dict(row)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, as data: the functions take a row of the publisher's file (or of the hub's copy).

    `question` is the prompt's text with any options in it, worded as in the publisher's demonstrations so that
    training and benchmark prompts agree. A missing column is a KeyError, which the reader turns into a UserError.
    """

    name: str
    hub: Hub
    question: Callable[[Row], str]
    gold: Callable[[Row], str]
    answer_kind: AnswerKind | Callable[[Row], AnswerKind]
    metric: Metric = "accuracy"
    """The headline: `accuracy` of one answer each, or `avg@k`, the mean over several samples of few questions."""
    subject: Callable[[Row], str] = lambda row: ""
    exclusions: Mapping[str, Callable[[Row], bool]] = field(default_factory=dict)
    """Reason → whether a row is left out for it."""


@dataclass(frozen=True)
class Questions:
    """The questions of a benchmark, and what became of the rows: `read` = rows + excluded + those beyond the limit."""

    rows: list[dict[str, Any]]
    """Rows of the table "questions", split "test", in the order of the file."""
    read: int
    excluded: Counter[str]
    """Reason → number of rows left out by the benchmark's rules."""
    beyond_limit: int
    left_out: tuple["LeftOut", ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A row that a benchmark's rules leave out, by name."""

    reason: str
    row: int
    """Its number in the file, from 1."""
    name: str
    """What the publisher calls it (its `id`), else the beginning of its question."""


def load(benchmark: Benchmark, source: BenchmarkSource, task: str) -> Questions:
    """The questions of `benchmark` from `source.path`, or from the hub where no path is given.

    `source.limit` keeps the questions with the smallest content hashes, so the choice does not depend on their order.
    Raises UserError for a file that is missing, empty, damaged or of another format.
    """
    where = source.path or benchmark.hub.name
    raw = file_rows(source.path) if source.path else enumerate(benchmark.hub.rows(), start=1)
    rows, left_out = _converted(benchmark, raw, task, where)
    excluded = Counter(row.reason for row in left_out)
    read = len(rows) + len(left_out)
    if not rows:
        raise UserError(f"benchmark {benchmark.name!r}: {where} has no usable question among its {read} rows")
    beyond = 0
    if source.limit is not None and len(rows) > source.limit:
        beyond = len(rows) - source.limit
        kept = {row["item_id"] for row in sorted(rows, key=lambda row: row["item_id"])[: source.limit]}
        rows = [row for row in rows if row["item_id"] in kept]
    return Questions(rows, read, excluded, beyond, tuple(left_out))


def _converted(
    benchmark: Benchmark, raw: Iterable[tuple[int, Row]], task: str, where: str
) -> tuple[list[dict[str, Any]], list[LeftOut]]:
    rows: list[dict[str, Any]] = []
    left_out: list[LeftOut] = []
    repeats: Counter[tuple[str, str]] = Counter()
    for number, row in raw:
        try:
            reason = next((name for name, applies in benchmark.exclusions.items() if applies(row)), None)
            if reason is not None:
                name = row.get("id") or " ".join(benchmark.question(row).split())[:80]
                left_out.append(LeftOut(reason, number, str(name)))
                continue
            question, gold, subject = benchmark.question(row), benchmark.gold(row), benchmark.subject(row)
            kind = benchmark.answer_kind(row) if callable(benchmark.answer_kind) else benchmark.answer_kind
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise _unreadable(benchmark, where, number, row, error) from None
        if not question.strip() or not gold.strip():
            lacking = "gold" if question.strip() else "question"
            raise UserError(
                f"benchmark {benchmark.name!r}: row {number} of {where} has an empty {lacking}; "
                "remove the row, or give the publisher's file"
            )
        repeats[question, gold] += 1
        rows.append(
            {
                "task": task,
                "benchmark": benchmark.name,
                # Repeated questions (TheoremQA has one) stay apart by their count.
                "item_id": stable_hash(benchmark.name, question, gold, repeats[question, gold])[:16],
                "question": question,
                "gold": gold,
                "answer_kind": kind,
                "subject": subject,
                "split": "test",
            }
        )
    return rows, left_out


def _unreadable(benchmark: Benchmark, where: str, number: int, row: Any, error: Exception) -> UserError:
    if isinstance(error, KeyError):
        why = f"has no column {error.args[0]!r}, its columns are {sorted(row)[:12]}"
    else:
        why = f"cannot be read ({error})"
    return UserError(
        f"benchmark {benchmark.name!r}: row {number} of {where} {why}; give a file in the publisher's format"
    )
