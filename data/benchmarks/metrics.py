"""Figures of a finished evaluation from its graded answers, and grading it again without a model."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, write_table
from data.grading import grade
from data.statistics import Estimate, bootstrap_mean, maj_at_k, pass_at_k, wilson

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """An accuracy over some questions."""

    questions: int
    accuracy: Estimate


@dataclass(frozen=True)
class Scores:
    """One model on one benchmark. Shares are between 0 and 1; intervals are over questions."""

    model: str
    task: str
    benchmark: str
    split: str
    questions: int
    answers: int
    samples: int
    """Fewest answers to a question: the largest k."""
    accuracy: Estimate
    """Mean over questions of the share of right answers: accuracy with one answer each, avg@k with k."""
    pass_at: dict[int, Estimate]
    """k → unbiased pass@k, for k = 1, 2, 4, ... and `samples`."""
    maj_at: dict[int, Estimate]
    """k → accuracy of the majority of the first k answers, for the same k."""
    truncated: float
    """Share of answers that ran into the token limit."""
    unanswered: float
    """Share of answers in which the grader found no answer."""
    subjects: dict[str, Score]
    """Subject → its accuracy; empty where the benchmark has none."""

    @property
    def headline(self) -> tuple[str, Estimate]:
        """The benchmark's main figure and its name: `accuracy`, or `avg@k` where a question has k answers."""
        return ("accuracy" if self.samples == 1 else f"avg@{self.samples}"), self.accuracy


def scores(rows: Iterable[Row], confidence: float = 0.95, seed: int = 0) -> list[Scores]:
    """The figures of each (model, task, benchmark, split) among rows of the table "evaluations", in their order.

    With one answer a question intervals are Wilson's; with several they are bootstraps over questions, since answers
    to one question are not independent (our choice). `seed` is the bootstrap's.
    """
    groups: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["task"], row["benchmark"], row["split"]].append(row)
    return [_scores(key, group, confidence, seed) for key, group in groups.items()]


def _scores(key: tuple[str, str, str, str], rows: Sequence[Row], confidence: float, seed: int) -> Scores:
    items: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        items[row["item_id"]].append(row)
    answers = [sorted(item, key=lambda row: row["sample"]) for item in items.values()]
    samples = min(map(len, answers))
    counts = [len(item) for item in answers]
    right = [sum(bool(row["correct"]) for row in item) for item in answers]
    subjects: dict[str, list[list[Row]]] = defaultdict(list)
    for item in answers:
        if item[0]["subject"]:
            subjects[item[0]["subject"]].append(item)

    pass_at, maj_at = {}, {}
    for k in _numbers_of_samples(samples):
        pass_at[k] = bootstrap_mean(pass_at_k(counts, right, k), confidence, seed=seed)
        votes = [
            maj_at_k([_ballot(row) for row in item[:k]], [bool(row["correct"]) for row in item[:k]]) for item in answers
        ]
        maj_at[k] = bootstrap_mean(votes, confidence, seed=seed)
    return Scores(
        *key,
        questions=len(answers),
        answers=len(rows),
        samples=samples,
        accuracy=_accuracy(answers, confidence, seed),
        pass_at=pass_at,
        maj_at=maj_at,
        truncated=sum(row["stop_reason"] == "length" for row in rows) / len(rows),
        unanswered=sum(not row["extracted"] for row in rows) / len(rows),
        subjects={
            name: Score(len(found), _accuracy(found, confidence, seed)) for name, found in sorted(subjects.items())
        },
    )


def _accuracy(answers: Sequence[Sequence[Row]], confidence: float, seed: int) -> Estimate:
    shares = [sum(bool(row["correct"]) for row in item) / len(item) for item in answers]
    if all(len(item) == 1 for item in answers):
        return wilson(round(sum(shares)), len(shares), confidence)
    return bootstrap_mean(shares, confidence, seed=seed)


def _numbers_of_samples(samples: int) -> list[int]:
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def _ballot(row: Row) -> str | None:
    """What an answer votes for: right ones together, however written; wrong ones by number or spelling."""
    text = row["extracted"]
    if not text:
        return None
    if row["correct"]:
        return row["gold"]
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return " ".join(text.casefold().split())
    return str(number.normalize()) if number.is_finite() else text


@dataclass(frozen=True)
class Regraded:
    """A finished evaluation under today's grader."""

    rows: list[dict[str, Any]]
    changed: list[dict[str, Any]]
    """The rows of which the verdict differs, as they were before."""


def regrade(path: Path, out: Path | None = None) -> Regraded:
    """Grades every completion of the evaluations file `path` again; no model is needed.

    `extracted`, `correct` and `reason` are made anew. `path` itself is left alone: `out`, where given, is the new
    file. Raises ValueError where `path` holds another table.
    """
    rows, changed = read_rows(path, "evaluations"), []
    fresh = []
    for row in rows:
        verdict = grade(row["completion"], row["gold"], kind=row["answer_kind"])
        if bool(row["correct"]) != verdict.correct:
            changed.append(row)
        fresh.append({**row, "extracted": verdict.parsed, "correct": verdict.correct, "reason": verdict.reason})
    if out is not None:
        write_table(out, "evaluations", fresh)
    return Regraded(fresh, changed)
