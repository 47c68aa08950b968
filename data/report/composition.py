"""Rank importance: how concentrated each task's is over the pool's ranks, and how much the tasks' top ranks overlap."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.artifacts import read_rows
from data.report.text import percent, plural

TOP_SHARE = 0.1  # the ranks that count as a task's top ranks in the overlap; our choice
SHOWN_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)

Rank = tuple[str, str, int]  # module, source, rank


@dataclass(frozen=True)
class TaskImportance:
    """One task's importance over the pool."""

    task: str
    cumulative: tuple[float, ...]
    """Share of the importance mass in the k most important ranks, k = 1 .. n_ranks."""
    by_source: dict[str, float]
    """Expert whose adapter the ranks came from → its share of the mass."""
    on: int
    """Ranks with a gate other than zero."""

    def within(self, share: float) -> float:
        """Mass in the top `share` of the ranks (at least one)."""
        return self.cumulative[max(1, round(share * len(self.cumulative))) - 1]


@dataclass(frozen=True)
class Importance:
    """What importance.parquet says, for one measure."""

    measure: str
    n_ranks: int
    tasks: tuple[TaskImportance, ...]
    top: int
    """How many ranks the overlap compares."""
    overlap: dict[tuple[str, str], float]
    """Jaccard index of two tasks' top ranks."""


def jaccard(left: set, right: set) -> float:
    """|left ∩ right| / |left ∪ right|; 1 for two empty sets."""
    return len(left & right) / len(left | right) if left | right else 1.0


def expected_jaccard(top: int, n: int) -> float:
    """About what two independent random sets of `top` out of `n` ranks give: p / (2 - p), p = top / n."""
    return top / (2 * n - top)


def concentration_note(importance: Importance) -> str:
    """What the shares by top ranks are of."""
    return (
        f"How much of a task's importance ({importance.measure or 'unnamed measure'}) lies in its most important "
        f"ranks, out of the pool's {plural(importance.n_ranks, 'rank')}."
    )


def overlap_note(importance: Importance) -> str:
    """How the overlap is to be read."""
    chance = expected_jaccard(importance.top, importance.n_ranks)
    return (
        f"Jaccard index of the {plural(importance.top, 'most important rank')} of two tasks: 1 the same ranks, 0 none "
        f"in common; about {chance:.2f} by chance."
    )


def source_rows(importance: Importance) -> tuple[list[str], list[list[str]]]:
    """The experts, and a row a task: its name, then the share of its importance in each expert's ranks."""
    found = {source for task in importance.tasks for source in task.by_source}
    tasks = [task.task for task in importance.tasks]
    sources = [task for task in tasks if task in found] + sorted(found - set(tasks))
    return sources, [[t.task, *(percent(t.by_source.get(source)) for source in sources)] for t in importance.tasks]


def _of_task(task: str, rows: Sequence[dict]) -> tuple[TaskImportance, list[Rank]]:
    ranked = sorted(rows, key=lambda row: (-abs(row["value"] or 0.0), row["module"], row["source"] or "", row["rank"]))
    masses = [abs(row["value"] or 0.0) for row in ranked]
    total = sum(masses)
    cumulative, so_far = [], 0.0
    for mass in masses:
        so_far += mass
        cumulative.append(so_far / total if total else 0.0)
    by_source: dict[str, float] = defaultdict(float)
    for row, mass in zip(ranked, masses):
        by_source[row["source"] or ""] += mass / total if total else 0.0
    on = sum(bool(row["gate"]) for row in ranked)
    ranks = [(row["module"], row["source"] or "", row["rank"]) for row in ranked]
    return TaskImportance(task, tuple(cumulative), dict(sorted(by_source.items())), on), ranks


def read_importance(path: Path) -> Importance | None:
    """The first measure of importance.parquet (by absolute value); None for an empty table."""
    rows = read_rows(path, "importance")
    if not rows:
        return None
    measure = rows[0]["measure"]
    groups: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        if row["measure"] == measure:
            groups[row["task"]].append(row)
    found = {task: _of_task(task, rows) for task, rows in groups.items()}
    n_ranks = max(len(ranks) for _, ranks in found.values())
    top = max(1, round(TOP_SHARE * n_ranks))
    tops = {task: set(ranks[:top]) for task, (_, ranks) in found.items()}
    overlap = {(a, b): jaccard(tops[a], tops[b]) for a in tops for b in tops}
    return Importance(measure or "", n_ranks, tuple(task for task, _ in found.values()), top, overlap)
