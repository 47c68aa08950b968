"""What the cells' tables say: learning curves, success by stage, generated tokens, samples."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel

from data.artifacts import read_rows
from data.report.request import CellFiles
from data.report.text import count, cut, decimal, percent, plural

REWARD, VALIDATION, REVEALED = "reward", "validation_accuracy", "revealed_share_mean"
STAGE_NAME = re.compile(r"(?P<kind>accuracy|rollouts)/stage_(?P<stage>\d+)")
EARLY_LATE = 3  # early and late: the first and the last third of the rounds; our choice
SMOOTHED = 8  # the reward curve averages over this share of the rounds; our choice

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One number of one cell over its training: (generated tokens so far, value) in order."""

    task: str
    arm: str
    seed: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class StageSuccess:
    """Sampled accuracy of one cell by stage (0 starts from the question), early and late in training."""

    task: str
    arm: str
    seed: int
    early: dict[int, float]
    late: dict[int, float]
    rounds: int
    """Rounds in each of the two averages, at most."""


@dataclass(frozen=True)
class Sample:
    """One rollout as the report shows it. `prefix + completion` is the text that was graded."""

    task: str
    arm: str
    seed: int
    stage: int
    n_stages: int | None
    question: str
    prefix: str
    completion: str
    answer: str
    parsed: str | None
    correct: bool
    reason: str
    reward: float | None
    tokens: int
    stop_reason: str


class CellResult(BaseModel):
    """What the report reads of a cell's result.json."""

    round: int | None
    """The round whose checkpoint was chosen; None: the warm-up's."""
    rounds: int
    generated_tokens: int
    validation_accuracy: float
    warmup_validation_accuracy: float
    last_validation_accuracy: float


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one cell that was chosen on validation, and where it lies on the validation curve."""

    task: str
    arm: str
    seed: int
    result: CellResult
    point: Point | None
    """None where the metrics do not have it."""


@dataclass
class Training:
    """All cells' figures."""

    validation: list[Curve] = field(default_factory=list)
    reward: list[Curve] = field(default_factory=list)
    stages: list[StageSuccess] = field(default_factory=list)
    revealed: list[Curve] = field(default_factory=list)
    """Mean revealed share of the rounds' start states."""
    stage_curves: dict[int, list[Curve]] = field(default_factory=dict)
    """Stage → sampled accuracy of its start states over the rounds."""
    tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    """(arm, task) → generated tokens, the mean over seeds."""
    checkpoints: list[Checkpoint] = field(default_factory=list)


def series(rows: Iterable[dict], name: str) -> tuple[Point, ...]:
    """(generated tokens so far, value) of the metric `name`, by tokens; rows without a value are left out."""
    found = [
        (float(row["generated_tokens_so_far"] or 0), row["value"])
        for row in rows
        if row["name"] == name and row["value"] is not None
    ]
    return tuple(sorted(found))


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """Centred running mean over one `SMOOTHED`-th of the points; the window shrinks at both ends."""
    half = max(1, len(points) // SMOOTHED) // 2
    values = [y for _, y in points]
    return tuple((x, fmean(values[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points))


def by_stage(rows: Iterable[dict], cell: CellFiles) -> StageSuccess | None:
    """Means of `accuracy/stage_<i>` over the first and the last third of the rounds; None where there are none.

    A round counts by its `rollouts/stage_<i>` where the metrics have them, so the mean is over rollouts.
    """
    values: dict[int, dict[int, float]] = defaultdict(dict)
    weights: dict[tuple[int, int], float] = {}
    for row in rows:
        match = STAGE_NAME.fullmatch(row["name"])
        if not match or row["value"] is None:
            continue
        number, stage = row["round"] or 0, int(match["stage"])
        if match["kind"] == "accuracy":
            values[number][stage] = row["value"]
        else:
            weights[number, stage] = row["value"]
    rounds = sorted(values)
    if not rounds:
        return None
    third = max(1, len(rounds) // EARLY_LATE)

    def means(chosen: Sequence[int]) -> dict[int, float]:
        found = {}
        for stage in sorted({stage for number in chosen for stage in values[number]}):
            having = [number for number in chosen if stage in values[number]]
            found[stage] = fmean([values[n][stage] for n in having], [weights.get((n, stage), 1.0) for n in having])
        return found

    return StageSuccess(cell.task, cell.arm, cell.seed, means(rounds[:third]), means(rounds[-third:]), third)


def read_training(cells: Sequence[CellFiles]) -> Training:
    """The figures of all cells that have metrics."""
    training = Training()
    spent: dict[tuple[str, str], list[int]] = defaultdict(list)
    for cell in cells:
        result = cell.folder / "result.json"
        rows = read_rows(cell.metrics, "metrics") if cell.metrics else []
        if result.is_file():
            found = CellResult.model_validate_json(result.read_text(encoding="utf-8"))
            chosen = series([row for row in rows if row["round"] == found.round], VALIDATION)
            point = chosen[0] if chosen else None
            training.checkpoints.append(Checkpoint(cell.task, cell.arm, cell.seed, found, point))
        for stage in sorted({int(match["stage"]) for row in rows if (match := STAGE_NAME.fullmatch(row["name"]))}):
            points = series(rows, f"accuracy/stage_{stage}")
            training.stage_curves.setdefault(stage, []).append(Curve(cell.task, cell.arm, cell.seed, points))
        named = ((VALIDATION, training.validation), (REWARD, training.reward), (REVEALED, training.revealed))
        for name, curves in named:
            if points := series(rows, name):
                curves.append(Curve(cell.task, cell.arm, cell.seed, points))
        if stages := by_stage(rows, cell):
            training.stages.append(stages)
        if rows:
            spent[cell.arm, cell.task].append(max(row["generated_tokens_so_far"] or 0 for row in rows))
    training.tokens = {key: round(fmean(values)) for key, values in spent.items()}
    return training


def _common_length(left: str, right: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def _wanted(stages: Sequence[int]) -> list[tuple[int, bool]]:
    """Which samples show most: right from late, middle and first start states, wrong from the first."""
    middle = stages[len(stages) // 2]
    return list(dict.fromkeys([(stages[-1], True), (middle, True), (stages[0], True), (stages[0], False)]))


def choose(rows: Sequence[dict]) -> list[dict]:
    """Up to four rollouts, each of another group: see `_wanted`. The first in the order of (group, sample)."""
    chosen: list[dict] = []
    stages = sorted({row["stage"] or 0 for row in rows})
    for stage, correct in _wanted(stages) if stages else []:
        fits = (row for row in rows if (row["stage"] or 0) == stage and bool(row["correct"]) == correct)
        taken = {row["group"] for row in chosen}
        fits = [row for row in fits if row["group"] not in taken]
        chosen += sorted(fits, key=lambda row: (row["group"], row["sample"]))[:1]
    return chosen


def restarted(row: dict) -> bool:
    """Whether a rollout started from an earlier rollout of meta-actions, so that no start state of the table is its."""
    return row["stage"] is None and row.get("trace") is not None


def samples_of(cell: CellFiles, start_states: Path | None) -> list[Sample]:
    """Samples of the cell's rollouts, with the question and the revealed prefix of their start states.

    The policy was given the prefix up to a token boundary at or before its end, so the part shown as the prefix is
    what the graded text and the start state's prefix have in common.
    """
    if cell.rollouts is None:
        return []
    states = {}
    if start_states is not None:
        states = {row["start_state_id"]: row for row in read_rows(start_states, "start_states")}
    found = []
    rows = read_rows(cell.rollouts, "rollouts")
    for row in choose([row for row in rows if not restarted(row)]):
        state = states.get(row["start_state_id"], {})
        text = row["completion"] or ""
        length = _common_length(state.get("prefix") or "", text)
        found.append(
            Sample(
                task=cell.task,
                arm=cell.arm,
                seed=cell.seed,
                stage=row["stage"] or 0,
                n_stages=state.get("n_stages"),
                question=state.get("question") or "(the start state of this rollout is not there)",
                prefix=text[:length],
                completion=text[length:],
                answer=state.get("answer") or "",
                parsed=row["parsed"],
                correct=bool(row["correct"]),
                reason=row["reason"] or "",
                reward=row["reward"],
                tokens=len(row["completion_ids"] or ()),
                stop_reason=row["stop_reason"] or "",
            )
        )
    return found


def sample_verdict(sample: Sample) -> str:
    """`right`, or `wrong` and why."""
    return "right" if sample.correct else f"wrong: {sample.reason or 'no reason given'}"


def sample_facts(sample: Sample) -> list[str]:
    """Where the rollout started, its reward and length, the answer read from it and the one that was wanted."""
    last = f" of {sample.n_stages - 1}" if sample.n_stages else ""
    return [
        f"stage {sample.stage}{last}" if sample.stage else "from the question",
        f"reward {decimal(sample.reward)}" if sample.reward is not None else "unscorable",
        plural(sample.tokens, "token"),
        f"read “{cut(sample.parsed, 60)}”" if sample.parsed else "no answer read",
        *([f"wanted “{cut(sample.answer, 60)}”"] if sample.answer else []),
    ]


def checkpoint_rows(training: Training) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of chosen checkpoints."""
    header = ("expert", "seed", "chosen", "of rounds", "generated tokens", "warm-up", "chosen checkpoint", "last round")
    rows = [
        (
            f"{found.task}, {found.arm}",
            str(found.seed),
            "warm-up" if found.result.round is None else f"round {found.result.round}",
            count(found.result.rounds),
            count(found.result.generated_tokens),
            percent(found.result.warmup_validation_accuracy),
            percent(found.result.validation_accuracy),
            percent(found.result.last_validation_accuracy),
        )
        for found in training.checkpoints
    ]
    return header, rows
