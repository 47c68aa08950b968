"""Figures of a finished evaluation from its graded answers, and grading it again without a model."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, replace_table
from data.errors import UserError
from data.grading import grade, warm
from data.statistics import Estimate, bootstrap_mean, maj_at_k, pass_at_k, wilson

Row = Mapping[str, Any]
GREEDY = -1
"""`sample` of a greedy answer that stands beside samples drawn with a temperature."""


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
    bootstrap: Estimate
    """The same mean with its bootstrap interval over questions."""
    greedy: Estimate | None
    """Accuracy of the greedy answers beside several samples (Wilson's interval); None where there are none."""
    pass_at: dict[int, Estimate]
    """k → unbiased pass@k, for k = 1, 2, 4, ... and `samples`."""
    maj_at: dict[int, Estimate]
    """k → accuracy of the majority of the first k answers, for the same k."""
    truncated: float
    """Share of answers (greedy ones beside samples aside, here and below) that ran into the token limit."""
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
    greedy = [row for row in rows if row["sample"] == GREEDY]
    sampled = [row for row in rows if row["sample"] != GREEDY]
    rows, greedy = (sampled, greedy) if sampled else (greedy, [])
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
        bootstrap=bootstrap_mean(_shares(answers), confidence, seed=seed),
        greedy=wilson(sum(bool(row["correct"]) for row in greedy), len(greedy), confidence) if greedy else None,
        pass_at=pass_at,
        maj_at=maj_at,
        truncated=sum(row["stop_reason"] == "length" for row in rows) / len(rows),
        unanswered=sum(not row["extracted"] for row in rows) / len(rows),
        subjects={
            name: Score(len(found), _accuracy(found, confidence, seed)) for name, found in sorted(subjects.items())
        },
    )


def _accuracy(answers: Sequence[Sequence[Row]], confidence: float, seed: int) -> Estimate:
    shares = _shares(answers)
    if all(len(item) == 1 for item in answers):
        return wilson(round(sum(shares)), len(shares), confidence)
    return bootstrap_mean(shares, confidence, seed=seed)


def _shares(answers: Sequence[Sequence[Row]]) -> list[float]:
    return [sum(bool(row["correct"]) for row in item) / len(item) for item in answers]


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


def evaluation_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of the evaluations file `path`, or of the one in the folder `path`.

    Raises UserError where there is none, where it is damaged, holds another table, or no row.
    """
    import pyarrow as pa

    file = path / "evaluations.parquet" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no file {file}; name an evaluations.parquet or the folder of a finished evaluation")
    try:
        rows = read_rows(file, "evaluations")
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is no Parquet file or a damaged one ({error}); evaluate again") from None
    except ValueError as error:
        raise UserError(f"{error}; name an evaluations.parquet") from None
    if not rows:
        raise UserError(f"{file} holds no answers; evaluate again")
    return rows


@dataclass(frozen=True)
class Regraded:
    """A finished evaluation under today's grader."""

    rows: list[dict[str, Any]]
    changed: list[dict[str, Any]]
    """The rows of which the verdict differs, as they were before."""


def regrade(path: Path, out: Path | None = None) -> Regraded:
    """Grades every completion of the evaluations file `path` again; no model is needed.

    `extracted`, `correct` and `reason` are made anew. `path` itself is left alone: `out`, where given, is the new
    file. Raises UserError where `path` is no finished evaluation.
    """
    rows, changed = evaluation_rows(path), []
    warm({row["answer_kind"] for row in rows})
    fresh = []
    for row in rows:
        verdict = grade(row["completion"], row["gold"], kind=row["answer_kind"])
        if bool(row["correct"]) != verdict.correct:
            changed.append(row)
        fresh.append({**row, "extracted": verdict.parsed, "correct": verdict.correct, "reason": verdict.reason})
    if out is not None:
        replace_table(out, "evaluations", fresh)
    return Regraded(fresh, changed)


def regraded_lines(found: Regraded, shown: int = 20) -> list[str]:
    """What changed: how many verdicts in which direction, then the first `shown` of them with both readings."""
    fresh = {_key(row): row for row in found.rows}
    gained = sum(not row["correct"] for row in found.changed)
    before = sum(bool(row["correct"]) for row in found.rows) - gained + (len(found.changed) - gained)
    after = sum(bool(row["correct"]) for row in found.rows)
    lines = [
        f"{len(found.rows)} answers graded again: {len(found.changed)} verdicts changed ({gained} to right, "
        f"{len(found.changed) - gained} to wrong); {before} were right, {after} are"
    ]
    for old in found.changed[:shown]:
        new = fresh[_key(old)]
        lines.append(
            f"  {old['model']} {old['benchmark']} {old['item_id']} sample {old['sample']}: "
            f"{'right' if new['correct'] else 'wrong'} now ({new['reason']}, read {new['extracted']!r}); "
            f"before {old['reason']}, read {old['extracted']!r}; gold {old['gold']!r}"
        )
    if len(found.changed) > shown:
        lines.append(f"  and {len(found.changed) - shown} more")
    return lines


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "task", "benchmark", "split", "item_id", "sample"))
