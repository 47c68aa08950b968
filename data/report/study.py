"""The results of a comparison study as files: Markdown with tables and pictures, and the JSON behind them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.report import plots
from data.storage import write_json
from data.study import CellRecord, Key, StudyShape, figures, read_cells

GRID = 40
"""Points of the token axis on which curves are averaged."""


def write_results(shape: StudyShape, out: Path, commit: str | None) -> dict[str, Any]:
    """Writes `out`/<study>.json and .md and the pictures in `out`/<study>/ from the cells there; returns the figures.

    What stands in `out`/<study>.notes.md (what did not work, in the author's words) goes into the Markdown.
    """
    folder = out / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    cells = read_cells(folder, shape)
    found = figures(cells, shape, commit)
    write_json(str(out / f"{shape.name}.json"), found)
    drawn = _pictures(cells, shape, found, folder)
    notes = out / f"{shape.name}.notes.md"
    said = notes.read_text(encoding="utf-8").strip() if notes.is_file() else ""
    (out / f"{shape.name}.md").write_text(markdown(shape, found, cells, drawn, said), encoding="utf-8")
    return found


def markdown(
    shape: StudyShape, found: dict[str, Any], cells: dict[Key, CellRecord], drawn: Sequence[str], notes: str
) -> str:
    """The results' text."""
    total = len(shape.tasks) * len(shape.arms) * len(shape.seeds)
    parts = [f"# {shape.title}", shape.scope]
    if found["missing"]:
        parts.append(
            f"**Not finished: {found['cells']} of {total} cells.** Figures that need a missing cell are empty."
        )
    if found["mixed_warmups"]:
        parts.append(f"**Arms that started from different warm-ups: {', '.join(found['mixed_warmups'])}.**")
    parts.append(f"Study file at commit `{found['commit']}`; seeds {', '.join(map(str, shape.seeds))}.")
    parts += ["## Differences", _differences(shape, found)]
    parts += ["## Accuracy", "Percent of test questions, greedy, from the question alone; the mean over seeds."]
    parts += [_accuracies(shape, found, "accuracy"), "Right with a chain in which every step checks out:"]
    parts += [_accuracies(shape, found, "valid"), "## Cost", _costs(shape, found), _tuning(cells, shape)]
    parts += ["## Warm-ups", _warmups(cells, shape)]
    parts += [f"![{name.replace('-', ' ')}]({shape.name}/{name}.png)" for name in drawn]
    if notes:
        parts += ["## What did not work", notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _interval(value: dict[str, float] | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return f"{value['mean']:{sign}.1f} [{value['low']:{sign}.1f}, {value['high']:{sign}.1f}]"


def _differences(shape: StudyShape, found: dict[str, Any]) -> str:
    text = (
        "Percentage points on the mean of the tasks, paired by seed and question; 95 % intervals from a bootstrap over "
        "seeds, then questions. Equal CPU: best validation accuracy so far where both arms have spent as many CPU "
        "seconds."
    )
    rows = []
    for spec in shape.comparisons:
        value, cpu = found["differences"][spec.name], found["equal_cpu"][spec.name]
        judged = "" if value is None or "met" not in value else "cleared" if value["met"] else "not cleared"
        bar = "–" if spec.bar is None else f"≥ {spec.bar:g}"
        if spec.interval_above is not None:
            bar += f", interval above {spec.interval_above:g}"
        valid = _interval(value.get("valid") if value else None, "+")
        name = f"`{spec.name}`: {spec.first} − {spec.second}"
        spent = "–" if cpu is None else f"{cpu['difference']:+.1f} ({cpu['cpu_seconds']:.0f} s)"
        rows.append([name, _interval(value, "+"), valid, bar, judged, spent])
    header = ["difference", "accuracy", "valid chains", "bar", "verdict", "validation at equal CPU"]
    tables = [text, _table(header, rows)]
    done = [spec for spec in shape.comparisons if found["differences"][spec.name] is not None]
    if done:
        by_task = [
            [task, *(_interval(found["differences"][spec.name]["tasks"][task], "+") for spec in done)]
            for task in shape.tasks
        ]
        tables.append(_table(["task", *(spec.name for spec in done)], by_task))
    return "\n\n".join(tables)


def _accuracies(shape: StudyShape, found: dict[str, Any], measure: str) -> str:
    rows = [[task, *(_interval(found["tasks"][task][arm][measure]) for arm in shape.arms)] for task in shape.tasks]
    rows.append(["**mean**", *(_interval(found["mean"][arm][measure]) for arm in shape.arms)])
    return _table(["task", *shape.arms], rows)


def _costs(shape: StudyShape, found: dict[str, Any]) -> str:
    """Means over the cells of an arm."""
    rows = []
    for arm in shape.arms:
        row = [arm]
        for name in ("generated_tokens", "processed_tokens", "cpu_seconds"):
            values = [found["tasks"][task][arm][name] for task in shape.tasks]
            known = [value for value in values if value is not None]
            row.append(f"{np.mean(known):,.0f}" if known else "–")
        rows.append(row)
    return _table(["arm, mean of a cell", "generated tokens", "processed tokens", "CPU seconds of training"], rows)


def _tuning(cells: dict[Key, CellRecord], shape: StudyShape) -> str:
    rows = []
    for arm in shape.arms:
        values = {
            json.dumps(record.info.get("tuned", {}), sort_keys=True) for key, record in cells.items() if key[1] == arm
        }
        if values - {"{}"}:
            rows.append([arm, "; ".join(sorted(values))])
    return _table(["arm", "tuned on validation of the pilot tasks, then frozen"], rows) if rows else ""


def _warmups(cells: dict[Key, CellRecord], shape: StudyShape) -> str:
    """Sampled success at the end of each warm-up, and whether the rule's bands were met."""
    rows = []
    for task in shape.tasks:
        infos = {
            key[2]: record.info["warmup"]
            for key, record in cells.items()
            if key[0] == task and record.info.get("warmup")
        }
        for seed, info in sorted(infos.items()):
            stages = [f"{100 * info[name]:.1f}" for name in ("stage_0", "stage_4")]
            rows.append([f"{task}, {seed}", str(info["steps"]), *stages, "yes" if info["rule_met"] else "no"])
    header = ["task, seed", "steps", "from the question, %", "from the last stage, %", "in both bands"]
    return "Sampled success on held-out demonstrations, valid chains.\n\n" + _table(header, rows) if rows else ""


def _averaged(curves: Sequence[Sequence[Sequence[float]]], end: float) -> tuple[np.ndarray, np.ndarray]:
    """Curves of (tokens, value) as their mean on a common grid, each held constant from point to point."""
    grid = np.linspace(0, end, GRID)
    held = []
    for curve in curves:
        x, y = np.array([point[0] for point in curve]), np.array([point[-1] for point in curve])
        held.append(y[np.clip(np.searchsorted(x, grid, side="right") - 1, 0, len(y) - 1)])
    return grid, np.mean(held, axis=0)


def _curves(cells: dict[Key, CellRecord], arm: str, name: str | None) -> list[list[list[float]]]:
    """The validation curves of an arm's cells, or the series `name` of their rounds."""
    infos = [record.info for key, record in sorted(cells.items()) if key[1] == arm]
    found = [info.get("curve") if name is None else info.get("series", {}).get(name) for info in infos]
    return [curve for curve in found if curve]


def _pictures(cells: dict[Key, CellRecord], shape: StudyShape, found: dict[str, Any], folder: Path) -> list[str]:
    """Draws what there are cells for; returns the names."""
    drawn = {
        "validation": _lines_over_tokens(cells, shape, {None: "-"}, "Validation accuracy, mean over tasks and seeds")
    }
    stages = {f"accuracy/stage_{stage}": style for stage, style in ((0, "-"), (2, "--"), (4, ":"))}
    drawn["stages"] = _lines_over_tokens(
        cells, shape, stages, "Sampled success: question —, middle - -, last stage ···"
    )
    drawn["revealed"] = _lines_over_tokens(
        cells, shape, {"revealed_share_mean": "-"}, "Revealed share of the demonstration"
    )
    for name, figure in drawn.items():
        if figure is not None:
            (folder / f"{name}.png").write_bytes(plots.png(figure, 110))
    return [name for name, figure in drawn.items() if figure is not None]


def _lines_over_tokens(
    cells: dict[Key, CellRecord], shape: StudyShape, series: dict[str | None, str], title: str
) -> Any:
    """Means over an arm's cells against generated tokens: one colour an arm, one line style a series."""
    arms = [arm for arm in shape.arms if any(_curves(cells, arm, name) for name in series)]
    if not arms:
        return None
    figure, axes = plots.new_axes(plots.LIGHT, title, 1.5 * plots.WIDTH, 1.2 * plots.HEIGHT)
    values = []
    for number, arm in enumerate(arms):
        for place, (name, style) in enumerate(series.items()):
            curves = _curves(cells, arm, name)
            if not curves:
                continue
            x, y = _averaged(curves, max(curve[-1][0] for curve in curves))
            label = arm if place == 0 else None
            colour = f"C{number % 10}"
            axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6, label=label)
            values += y.tolist()
    plots.percent_axis(axes, values)
    plots.token_axis(axes, plots.LIGHT)
    plots.add_legend(axes, plots.LIGHT)
    return figure
