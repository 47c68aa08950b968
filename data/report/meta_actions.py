"""What the report says of meta-actions: figures of the cells by name, attempts on the test questions, alarms."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from data.artifacts import read_rows
from data.meta_actions.alarms import line_of
from data.meta_actions.grammar import LEGAL, opening
from data.meta_actions.judging import first_and_last, judge
from data.report.request import CellFiles

PREFIX, ALARM = "meta/", "meta/alarm_"
LATE = 3  # the table averages over this last share of the rounds; our choice

Point = tuple[float, float]

PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("share of the actions", tuple((f"share_{a}", a) for a in ("reason", "critique", "refine", "answer"))),
    ("entropy of the choice", (("boundary_entropy", "share of its maximum"),)),
    ("right at the first and last attempt", (("accuracy_first", "first"), ("accuracy_last", "last"))),
    ("what the revision changed", (("wrong_to_right", "wrong to right"), ("right_to_wrong", "right to wrong"))),
    (
        "verdicts",
        (
            ("verdict_true_positive", "“correct” of right"),
            ("verdict_false_positive", "“correct” of wrong"),
            ("refine_success", "refine success"),
        ),
    ),
    ("blocks by difficulty", (("blocks_hard", "hard"), ("blocks_medium", "medium"), ("blocks_easy", "easy"))),
    ("restarts", (("restart_share", "share"), ("restart_value_mean", "value"), ("restart_accuracy", "accuracy"))),
    ("groups that teach nothing", (("zero_variance_root", "roots"), ("zero_variance_restart", "restarts"))),
)
"""Title of each panel, and its figures with their labels."""

LABELS = {name: f"{title}: {label}" for title, figures in PANELS for name, label in figures} | {
    "malformed_share": "malformed traces",
    "full_share": "traces at the limit of blocks",
    "tokens_per_block": "tokens a block",
    "signature_top_share": "most frequent signature",
    "changed_share": "revised answers among traces with several attempts",
    "verdict_balanced_accuracy": "verdicts: balanced accuracy",
    "restart_wrong_share": "restarts: from wrong candidates",
}
"""Figure → what the table calls it."""


@dataclass(frozen=True)
class RungAlarm:
    """An alarm of one cell."""

    name: str
    first_round: int
    rounds: int
    advice: str


@dataclass(frozen=True)
class MetaCell:
    """The meta-action figures of one cell."""

    task: str
    arm: str
    seed: int
    series: dict[str, tuple[Point, ...]]
    """Figure (without its prefix) → (generated tokens, value) in order."""
    late: dict[str, float]
    """Figure → its mean over the last third of the rounds."""
    alarms: tuple[RungAlarm, ...]

    @property
    def title(self) -> str:
        """What the cell is called."""
        return f"{self.task}, {self.arm}"

    def matrix(self) -> list[tuple[str, dict[str, float]]]:
        """State → share of each action chosen in it, over the last third of the rounds."""
        found = []
        for state, actions in LEGAL.items():
            if len(actions) == 1:
                found.append((state, {actions[0]: 1.0}))
                continue
            shares = {a: self.late[f"choice_{state}_{a}"] for a in actions if f"choice_{state}_{a}" in self.late}
            if shares:
                found.append((state, shares))
        return found


@dataclass(frozen=True)
class TestAttempts:
    """One model's traces on the test questions of one task."""

    model: str
    task: str
    answers: int
    first: float
    last: float
    wrong_to_right: float
    right_to_wrong: float
    tokens: float
    """Mean tokens an answer."""


def read_cells(cells: Sequence[CellFiles]) -> list[MetaCell]:
    """The cells that were trained on meta-actions."""
    found = []
    for cell in cells:
        rows = [r for r in read_rows(cell.metrics, "metrics") if r["name"].startswith(PREFIX)] if cell.metrics else []
        if rows:
            found.append(_cell(cell, rows))
    return found


def _cell(cell: CellFiles, rows: Sequence[dict]) -> MetaCell:
    series: dict[str, list[Point]] = defaultdict(list)
    late: dict[str, list[float]] = defaultdict(list)
    rung: dict[str, list[int]] = defaultdict(list)
    last = max(row["round"] or 0 for row in rows)
    for row in sorted(rows, key=lambda row: row["round"] or 0):
        if row["name"].startswith(ALARM):
            rung[row["name"].removeprefix(ALARM)].append(row["round"] or 0)
            continue
        name = row["name"].removeprefix(PREFIX)
        series[name].append((float(row["generated_tokens_so_far"] or 0), row["value"]))
        if (row["round"] or 0) > last - max(1, (last + 1) // LATE):
            late[name].append(row["value"])
    alarms = [RungAlarm(name, rounds[0], len(rounds), line_of(name) or "") for name, rounds in sorted(rung.items())]
    return MetaCell(
        cell.task,
        cell.arm,
        cell.seed,
        {name: tuple(points) for name, points in series.items()},
        {name: fmean(values) for name, values in late.items()},
        tuple(alarms),
    )


def read_attempts(evaluations: Iterable[Path]) -> list[TestAttempts]:
    """First and last attempts of every model that answers in traces, from the answers to the test questions."""
    answers: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for path in evaluations:
        for row in read_rows(path, "evaluations"):
            answers[row["model"], row["task"]].append(row)
    found = []
    for (model, task), rows in answers.items():
        if sum((row["completion"] or "").lstrip().startswith(opening("reason")) for row in rows) < len(rows) / 2:
            continue
        pairs = [first_and_last(judge(row["completion"] or "", row["gold"], row["answer_kind"])) for row in rows]
        found.append(
            TestAttempts(
                model=model,
                task=task,
                answers=len(rows),
                first=fmean(first for first, _ in pairs),
                last=fmean(last for _, last in pairs),
                wrong_to_right=fmean(last and not first for first, last in pairs),
                right_to_wrong=fmean(first and not last for first, last in pairs),
                tokens=fmean(row["completion_tokens"] for row in rows),
            )
        )
    return found


def attempt_rows(attempts: Sequence[TestAttempts]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of test attempts."""
    header = ("model", "task", "first attempt", "last attempt", "wrong to right", "right to wrong", "tokens an answer")
    rows = [
        (a.model, a.task, *(f"{100 * v:.1f} %" for v in (a.first, a.last, a.wrong_to_right, a.right_to_wrong)),
         f"{a.tokens:.1f}")
        for a in attempts
    ]  # fmt: skip
    return header, rows


def figure_rows(cells: Sequence[MetaCell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of figures late in training, one column a cell."""
    header = ("late in training", *(cell.title for cell in cells))
    rows = [
        (label, *(f"{cell.late[name]:.3g}" if name in cell.late else "" for cell in cells))
        for name, label in LABELS.items()
        if any(name in cell.late for cell in cells)
    ]
    return header, rows


def alarm_rows(cells: Sequence[MetaCell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of alarms."""
    rows = [
        (cell.title, alarm.name.replace("_", " "), str(alarm.first_round), str(alarm.rounds), alarm.advice)
        for cell in cells
        for alarm in cell.alarms
    ]
    return ("expert", "alarm", "first round", "rounds", "what to change"), rows


def matrix_rows(cell: MetaCell) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the transition table of a cell."""
    actions = ("reason", "critique", "refine", "answer")
    rows = [
        (state.replace("_", " "), *(f"{100 * shares[a]:.0f} %" if a in shares else "–" for a in actions))
        for state, shares in cell.matrix()
    ]
    return ("after", *actions), rows
