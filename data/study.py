"""The figures of a comparison study, all from its per-answer tables and the cells' own records.

Accuracies are in percent, differences in percentage points. numpy only; every bootstrap takes a seed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.artifacts import read_table
from data.errors import UserError
from data.settings import Settings
from data.statistics import Estimate, paired_bootstrap_tasks

MEASURES = {"accuracy": "correct", "valid": "chain_valid"}
"""Figure → column of the per-answer table."""


class Comparison(Settings):
    """A difference that the study claims something about, on the mean over tasks, and the bar that it must clear."""

    name: str
    first: str
    second: str
    """Arms; the difference is first − second."""
    bar: float | None = None
    """Least mean difference in percentage points; None: reported, not judged."""
    interval_above: float | None = None
    """What the interval's low end must exceed; None: nothing."""


class StudyShape(Settings):
    """What the figures need to know of a study."""

    name: str
    title: str
    scope: str
    """What the claim holds for, and for what it does not."""
    tasks: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class CellRecord:
    """One finished cell: its per-answer columns (N questions) and what its cell.json says."""

    columns: dict[str, NDArray[np.float64] | None]
    """Measure → 1.0 or 0.0 for each question; None where the task cannot judge it."""
    info: dict[str, Any]


Key = tuple[str, str, int]
"""Task, arm, seed."""


def cell_name(task: str, arm: str, seed: int) -> str:
    """File name of a cell's results, without ending."""
    return f"{task}--{arm}--{seed}"


def read_cells(folder: Path, shape: StudyShape) -> dict[Key, CellRecord]:
    """The cells of the study whose results lie in `folder`. Raises UserError where a table has no record."""
    found = {}
    for task in shape.tasks:
        for arm in shape.arms:
            for seed in shape.seeds:
                path = folder / f"{cell_name(task, arm, seed)}.parquet"
                if not path.is_file():
                    continue
                record = path.with_suffix(".json")
                if not record.is_file():
                    raise UserError(f"{path} has no {record.name} beside it; run the cell again")
                found[task, arm, seed] = CellRecord(_columns(path), json.loads(record.read_text(encoding="utf-8")))
    return found


def _columns(path: Path) -> dict[str, NDArray[np.float64] | None]:
    table = read_table(path, "study_answers")
    columns = {}
    for measure, name in MEASURES.items():
        column = table[name]
        columns[measure] = None if column.null_count else column.to_numpy().astype(np.float64)
    return columns


def matrix(cells: dict[Key, CellRecord], shape: StudyShape, task: str, arm: str, measure: str) -> NDArray | None:
    """R seeds × N questions of one task and arm; None unless all seeds are there and the measure can be judged."""
    rows = [cells.get((task, arm, seed)) for seed in shape.seeds]
    if any(row is None or row.columns[measure] is None for row in rows):
        return None
    lengths = {len(row.columns[measure]) for row in rows}
    if len(lengths) > 1:
        raise UserError(f"the seeds of {task}/{arm} answered different numbers of questions; run its cells again")
    return np.stack([row.columns[measure] for row in rows])


def points(estimate: Estimate) -> dict[str, float]:
    """An estimate of shares in percent (points)."""
    return {name: round(100 * value, 3) for name, value in estimate._asdict().items()}


def figures(cells: dict[Key, CellRecord], shape: StudyShape, commit: str | None) -> dict[str, Any]:
    """Every figure of the results, as JSON values: the same tables give the same figures."""
    wanted = [(task, arm, seed) for task in shape.tasks for arm in shape.arms for seed in shape.seeds]
    return {
        "study": shape.name,
        "commit": commit,
        "seeds": list(shape.seeds),
        "cells": len(cells),
        "missing": ["/".join(map(str, key)) for key in wanted if key not in cells],
        "mixed_warmups": mixed_warmups(cells),
        "tasks": {task: _task(cells, shape, task) for task in shape.tasks},
        "mean": {arm: _mean(cells, shape, arm) for arm in shape.arms},
        "differences": {spec.name: difference(cells, shape, spec) for spec in shape.comparisons},
        "equal_cpu": {spec.name: equal_cpu(cells, shape, spec) for spec in shape.comparisons},
    }


def mixed_warmups(cells: dict[Key, CellRecord]) -> list[str]:
    """The task/seed whose cells did not all start from one warm-up (made on machines that round differently)."""
    found: dict[tuple[str, int], set[str]] = {}
    for (task, _, seed), record in cells.items():
        if record.info.get("warmup_sha256"):
            found.setdefault((task, seed), set()).add(record.info["warmup_sha256"])
    return [f"{task}/{seed}" for (task, seed), hashes in sorted(found.items()) if len(hashes) > 1]


def _task(cells: dict[Key, CellRecord], shape: StudyShape, task: str) -> dict[str, Any]:
    found = {}
    for arm in shape.arms:
        values = {}
        for measure in MEASURES:
            rows = matrix(cells, shape, task, arm, measure)
            values[measure] = None if rows is None else points(paired_bootstrap_tasks([rows]))
        infos = [cells[task, arm, seed].info for seed in shape.seeds if (task, arm, seed) in cells]
        found[arm] = values | {
            name: _average(infos, name) for name in ("generated_tokens", "processed_tokens", "cpu_seconds")
        }
    return found


def _average(infos: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [info[name] for info in infos if info.get(name) is not None]
    return round(float(np.mean(values)), 1) if values else None


def _mean(cells: dict[Key, CellRecord], shape: StudyShape, arm: str) -> dict[str, Any]:
    """An arm's accuracy on the mean over the tasks; None for a measure that not every task has."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        rows = [matrix(cells, shape, task, arm, measure) for task in shape.tasks]
        found[measure] = None if any(row is None for row in rows) else points(paired_bootstrap_tasks(rows))
    return found


def difference(cells: dict[Key, CellRecord], shape: StudyShape, spec: Comparison) -> dict[str, Any] | None:
    """first − second on the mean over tasks {mean, low, high}, by task and on valid chains; whether it clears the bar.

    None while a cell of either arm is missing.
    """
    found: dict[str, Any] = {}
    for measure in MEASURES:
        pairs = [
            [matrix(cells, shape, task, arm, measure) for arm in (spec.first, spec.second)] for task in shape.tasks
        ]
        if any(array is None for pair in pairs for array in pair):
            if measure == "accuracy":
                return None
            continue
        for task, pair in zip(shape.tasks, pairs):
            if pair[0].shape != pair[1].shape:
                raise UserError(f"{task}: {spec.first} and {spec.second} answered different questions")
        arrays = [first - second for first, second in pairs]
        whole = points(paired_bootstrap_tasks(arrays))
        whole["tasks"] = {task: points(paired_bootstrap_tasks([array])) for task, array in zip(shape.tasks, arrays)}
        if measure == "accuracy":
            found |= whole
        else:
            found[measure] = whole
    if spec.bar is not None or spec.interval_above is not None:
        enough = spec.bar is None or found["mean"] >= spec.bar
        found["bar"] = spec.bar
        found["met"] = bool(enough and (spec.interval_above is None or found["low"] > spec.interval_above))
    return found


def equal_cpu(cells: dict[Key, CellRecord], shape: StudyShape, spec: Comparison) -> dict[str, Any] | None:
    """Best validation accuracy so far of both arms where both have spent as many CPU seconds, over all cells.

    For each task and seed that is the smaller of the two cells' totals. None where no pair of cells has curves.
    """
    firsts, seconds, spent = [], [], []
    for task in shape.tasks:
        for seed in shape.seeds:
            pair = [cells.get((task, arm, seed)) for arm in (spec.first, spec.second)]
            curves = [cell.info.get("curve") if cell else None for cell in pair]
            if not all(curves):
                continue
            limit = min(curve[-1][1] for curve in curves)
            best = [max(point[2] for point in curve if point[1] <= limit) for curve in curves]
            firsts.append(best[0])
            seconds.append(best[1])
            spent.append(limit)
    if not firsts:
        return None
    gain = 100 * (float(np.mean(firsts)) - float(np.mean(seconds)))
    values = {
        "first": 100 * np.mean(firsts),
        "second": 100 * np.mean(seconds),
        "difference": gain,
        "cpu_seconds": np.mean(spent),
    }
    return {name: round(float(value), 3) for name, value in values.items()} | {"pairs": len(firsts)}
