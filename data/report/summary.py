"""Answers → accuracies with intervals, and the one sentence that says what they show."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.artifacts import read_rows
from data.report.request import ReportRequest
from data.report.text import point_interval, points
from data.statistics import Estimate, bootstrap_mean, paired_bootstrap, wilson

UNEQUAL_TOKENS = 0.1  # arms whose generated tokens differ by more than this share are not called equal; our choice


@dataclass(frozen=True)
class SummaryRow:
    """One model on one task's benchmark: a row of the table `summary`."""

    task: str
    benchmark: str
    model: str
    split: str
    n: int
    answers: int
    correct: int
    accuracy: float
    low: float
    high: float
    generated_tokens: int | None
    truncated_share: float
    no_answer_share: float

    @property
    def column(self) -> tuple[str, str, str]:
        """What the row's accuracy is about."""
        return self.task, self.benchmark, self.split


@dataclass(frozen=True)
class Difference:
    """Accuracy of `model` minus that of `reference` on the questions that both answered."""

    task: str
    benchmark: str
    split: str
    model: str
    reference: str
    n: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Answers:
    """What the summary needs of the answers of one (task, benchmark, split, model)."""

    shares: dict[str, float]
    """Question → share of its answers that are correct."""
    answers: int
    correct: int
    truncated: int
    unread: int


def read_answers(paths: Sequence[Path]) -> dict[tuple[str, str, str, str], Answers]:
    """(task, benchmark, split, model) → its answers, over all files."""
    groups: dict[tuple[str, str, str, str], list[dict]] = defaultdict(list)
    for path in paths:
        for row in read_rows(path, "evaluations"):
            groups[row["task"], row["benchmark"], row["split"], row["model"]].append(row)
    found = {}
    for key, rows in groups.items():
        by_question: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            by_question[row["item_id"]].append(bool(row["correct"]))
        found[key] = Answers(
            shares={item: sum(correct) / len(correct) for item, correct in by_question.items()},
            answers=len(rows),
            correct=sum(bool(row["correct"]) for row in rows),
            truncated=sum(row["stop_reason"] == "length" for row in rows),
            unread=sum(row["extracted"] is None for row in rows),
        )
    return found


def accuracy_interval(answers: Answers, confidence: float) -> Estimate:
    """Accuracy with Wilson's interval where each question has one answer.

    Several answers to a question are not independent: then a bootstrap over questions (our choice).
    """
    n = len(answers.shares)
    if answers.answers == n:
        return wilson(answers.correct, n, confidence)
    return bootstrap_mean(list(answers.shares.values()), confidence)


def generated_tokens(request: ReportRequest, trained: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """(model, task) → tokens sampled in training: the request's word, else `trained` (arm, task)."""
    said = {(model, task): n for model, tasks in request.generated.items() for task, n in tasks.items()}
    return {**trained, **said}


def model_order(models: Sequence[str], arms: Sequence[str]) -> list[str]:
    """base, warmup, the arms as the request orders them, then the others as they come."""
    first = [name for name in ("base", "warmup", *arms) if name in models]
    return list(dict.fromkeys([*first, *models]))


def summarise(
    answers: dict[tuple[str, str, str, str], Answers],
    tokens: dict[tuple[str, str], int],
    tasks: Sequence[str],
    models: Sequence[str],
    confidence: float,
) -> list[SummaryRow]:
    """The rows of the table `summary`, in the order of `tasks`, then of `models`."""
    rows = []
    for (task, benchmark, split, model), found in answers.items():
        estimate = accuracy_interval(found, confidence)
        rows.append(
            SummaryRow(
                task=task,
                benchmark=benchmark,
                model=model,
                split=split,
                n=len(found.shares),
                answers=found.answers,
                correct=found.correct,
                accuracy=estimate.mean,
                low=estimate.low,
                high=estimate.high,
                generated_tokens=tokens.get((model, task)),
                truncated_share=found.truncated / found.answers,
                no_answer_share=found.unread / found.answers,
            )
        )
    return sorted(rows, key=lambda row: (tasks.index(row.task), row.column, models.index(row.model)))


def compared_models(request: ReportRequest, arms: Sequence[str], models: Sequence[str]) -> tuple[str, str] | None:
    """The pair of the verdict: the request's, else the last arm and the first, else what there is."""
    if request.headline:
        return request.headline
    candidates = [(arms[-1], arms[0])] if len(arms) > 1 else []
    candidates += [(arms[-1], "warmup"), (arms[-1], "base")] if arms else []
    candidates += [("composed", "warmup"), ("composed", "base"), ("warmup", "base")]
    return next((pair for pair in candidates if set(pair) <= set(models)), None)


def differences(
    answers: dict[tuple[str, str, str, str], Answers], pair: tuple[str, str], tasks: Sequence[str], confidence: float
) -> list[Difference]:
    """The pair's paired differences, one for each benchmark that both answered."""
    model, reference = pair
    found = []
    for task, benchmark, split in sorted({key[:3] for key in answers}, key=lambda key: (tasks.index(key[0]), key)):
        left, right = (answers.get((task, benchmark, split, name)) for name in (model, reference))
        shared = sorted(set(left.shares) & set(right.shares)) if left and right else []
        if not shared:
            continue
        a, b = [left.shares[item] for item in shared], [right.shares[item] for item in shared]
        estimate = paired_bootstrap(a, b, confidence)
        found.append(Difference(task, benchmark, split, *pair, len(shared), estimate.mean, estimate.low, estimate.high))
    return found


def caveats(
    pair: tuple[str, str], tasks: Sequence[str], seeds: dict[str, int], tokens: dict[tuple[str, str], int]
) -> list[str]:
    """What keeps the pair's differences from being a comparison of methods: seeds, unequal generated tokens."""
    said = []
    fewest = min(seeds.get(name, 1) for name in pair)  # what is no arm of a cell was trained once
    said.append("one seed, not a comparison" if fewest == 1 else f"{fewest} seeds")
    if all(name in seeds for name in pair):
        spent = [[tokens.get((name, task)) for name in pair] for task in tasks]
        if any(None in both for both in spent):
            said.append("generated tokens not known for both")
        elif any(abs(a - b) > UNEQUAL_TOKENS * max(a, b, 1) for a, b in spent):
            said.append("unequal generated tokens")
    return said


def verdict(pair: tuple[str, str] | None, found: Sequence[Difference], said: Sequence[str], confidence: float) -> str:
    """One sentence: on how many benchmarks the model is above its reference, and how many of the intervals agree."""
    if pair is None or not found:
        return "Nothing is compared: no two models answered the same questions."
    model, reference = pair
    above, equal = [d for d in found if d.mean > 0], [d for d in found if d.mean == 0]
    below = [d for d in found if d.mean < 0]
    clear = [d for d in above if d.low > 0], [d for d in below if d.high < 0]
    tail = "".join(f"; {text}" for text in said) + "."
    level = f"{100 * confidence:.3g} %"
    if len(found) == 1:
        where = {1: "above", 0: "level with", -1: "below"}[(found[0].mean > 0) - (found[0].mean < 0)]
        sure = "excludes" if clear[0] or clear[1] else "includes"
        span = point_interval(found[0].low, found[0].high)
        by = "" if where == "level with" else f" by {points(abs(found[0].mean)).lstrip('+')}"
        return f"{model} is {where} {reference} on {found[0].task}{by} ({level} interval {span} {sure} zero){tail}"
    text = f"{model} is above {reference} on {len(above)} of {len(found)} tasks"
    others = [f"level on {len(equal)}"] * bool(equal) + [f"below on {len(below)}"] * bool(below)
    text += "".join(f", {other}" for other in others)
    sides = [f"{len(side)} {word}" for side, word in zip(clear, ("above", "below")) if side]
    where = " and ".join(sides) if clear[1] else str(len(clear[0]))
    sure = f"excludes zero on {where}" if sides else "includes zero on every one"
    text += f" (the {level} interval of the difference {sure})"
    return text + tail
