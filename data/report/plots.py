"""The report's pictures: PNG bytes from matplotlib's Agg canvas, without pyplot's global state, light or dark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from data.report import meta_plots
from data.report.composition import Importance
from data.report.content import Content, column_title
from data.report.text import plot_text, short_count
from data.report.training import Checkpoint, Curve, smoothed

COLOURS = 96  # of the palette that the PNG is reduced to: a third of the bytes, no visible difference
WIDTH, HEIGHT = 4.8, 3.0  # inches; shown at about half its pixels


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    paper: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1d2530", "#66707d", "#e4e7eb", ("#8a94a1", "#0f6b8f", "#c2612c", "#5b7f3a", "#7a5aa6", "#a8842c")
)
DARK = Theme(
    "#171b21", "#e6e9ee", "#98a2af", "#2b323b", ("#8f9aa8", "#4fb3d9", "#e59262", "#9cc474", "#b79be0", "#dabb63")
)
MARKERS = ("s", "o", "^", "D", "v", "P")


@dataclass(frozen=True)
class Picture:
    """One picture in both themes."""

    name: str
    """File name without `.png`."""
    section: str
    """What it belongs to: accuracy, curves, stages, meta_actions or importance."""
    task: str | None
    alt: str
    light: bytes
    dark: bytes


def series_index(names: Sequence[str], name: str) -> int:
    """Colour and marker of the series `name`. One arm alone takes the accent, not the reference's grey."""
    return (names.index(name) + (len(names) == 1)) % len(MARKERS)


def new_axes(theme: Theme, title: str, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` × `height` inches with one titled plot in the report's style."""
    figure = Figure(figsize=(width, height), facecolor=theme.paper, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.paper)
    axes.set_title(plot_text(title), loc="left", color=theme.ink, fontsize=10.5, fontweight="bold", pad=8)
    axes.tick_params(colors=theme.muted, labelsize=9, length=0, pad=5)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    return figure, axes


def add_legend(axes: Axes, theme: Theme) -> None:
    """A legend of the labelled series, where there are any."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink, loc="best", handlelength=1.6, borderaxespad=0.2)


def png(figure: Figure, dpi: int) -> bytes:
    """The figure as PNG with a reduced palette. The same figure gives the same bytes."""
    raw, small = BytesIO(), BytesIO()
    figure.savefig(raw, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    image = Image.open(raw).convert("RGB")
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def percent_axis(axes: Axes, values: Sequence[float]) -> None:
    """A vertical axis from 0 in percent, with room above the largest of `values` (shares)."""
    top = min(1.0, max([*values, 0.05]) * 1.15)
    axes.set_ylim(0, top if top < 0.9 else 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g} %"))


def token_axis(axes: Axes, theme: Theme) -> None:
    """A horizontal axis of generated tokens, from 0."""
    left, right = axes.get_xlim()
    axes.set_xlim(min(0.0, left), right)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_count(x)))
    axes.set_xlabel("generated tokens", color=theme.muted, fontsize=9)


def validation_plot(
    curves: Sequence[Curve], chosen: Sequence[Checkpoint], arms: Sequence[str], theme: Theme, title: str
) -> Figure:
    """Validation accuracy against generated tokens, one line a cell, one colour an arm; a ring on the chosen one."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    named = set()
    for curve in curves:
        i = series_index(arms, curve.arm)
        x, y = zip(*curve.points)
        label = None if curve.arm in named else plot_text(curve.arm)
        axes.plot(
            x, y, color=theme.series[i], marker=MARKERS[i], markersize=4.5, linewidth=1.8, label=label, clip_on=False
        )
        named.add(curve.arm)
    for checkpoint in chosen:
        colour = theme.series[series_index(arms, checkpoint.arm)]
        axes.plot(*checkpoint.point, marker="o", markersize=11, color="none", markeredgecolor=colour, clip_on=False)
    percent_axis(axes, [y for curve in curves for _, y in curve.points])
    token_axis(axes, theme)
    add_legend(axes, theme)
    return figure


def reward_plot(curves: Sequence[Curve], arms: Sequence[str], theme: Theme, title: str) -> Figure:
    """Mean reward of the rounds' rollouts against generated tokens: each round pale, the running mean strong."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    named = set()
    for curve in curves:
        i = series_index(arms, curve.arm)
        x, y = zip(*curve.points)
        axes.plot(x, y, color=theme.series[i], linewidth=0.7, alpha=0.4)
        label = None if curve.arm in named else plot_text(curve.arm)
        axes.plot(x, [value for _, value in smoothed(curve.points)], color=theme.series[i], linewidth=1.8, label=label)
        named.add(curve.arm)
    values = [y for curve in curves for _, y in curve.points]
    low, high = min(0.0, *values), max(values)
    axes.set_ylim(low, high + 0.12 * (high - low or 1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    token_axis(axes, theme)
    add_legend(axes, theme)
    return figure


def stage_plot(content: Content, task: str, theme: Theme, title: str) -> Figure:
    """Sampled accuracy by stage: hollow early in training, filled late, one column of pairs a stage."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    cells = [cell for cell in content.training.stages if cell.task == task]
    stages = sorted({stage for cell in cells for stage in (*cell.early, *cell.late)})
    named = set()
    for position, cell in enumerate(cells):
        i = series_index(content.arms, cell.arm)
        colour, marker = theme.series[i], MARKERS[i]
        shift = 0.16 * (position - (len(cells) - 1) / 2)
        for stage in sorted(set(cell.early) & set(cell.late)):
            axes.plot(
                [stage + shift] * 2, [cell.early[stage], cell.late[stage]], color=colour, linewidth=1.4, alpha=0.6
            )
        for when, values, face in (("early", cell.early, theme.paper), ("late", cell.late, colour)):
            x = [stage + shift for stage in values]
            label = plot_text(f"{cell.arm}, {when}")
            axes.plot(
                x, list(values.values()), linestyle="none", marker=marker, markersize=6.5, color=colour,
                markerfacecolor=face, markeredgewidth=1.4, clip_on=False, label=None if label in named else label,
            )  # fmt: skip
            named.add(label)
    percent_axis(axes, [y for cell in cells for y in (*cell.early.values(), *cell.late.values())])
    axes.set_xlim(stages[0] - 0.5, stages[-1] + 0.5)
    axes.set_xticks(stages, [f"{stage}\nquestion" if stage == 0 else str(stage) for stage in stages])
    axes.set_xlabel("stage: 0 starts from the question, the last one nearest the answer", color=theme.muted, fontsize=9)
    add_legend(axes, theme)
    return figure


def revealed_plot(curves: Sequence[Curve], arms: Sequence[str], theme: Theme, title: str) -> Figure:
    """Mean revealed share of the rounds' start states against generated tokens, one line a cell."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    named = set()
    for curve in curves:
        i = series_index(arms, curve.arm)
        x, y = zip(*curve.points)
        label = None if curve.arm in named else plot_text(curve.arm)
        axes.plot(x, y, color=theme.series[i], linewidth=1.8, label=label)
        named.add(curve.arm)
    percent_axis(axes, [y for curve in curves for _, y in curve.points])
    token_axis(axes, theme)
    add_legend(axes, theme)
    return figure


def stage_curves_plot(curves: dict[int, list[Curve]], arms: Sequence[str], theme: Theme, title: str) -> Figure:
    """Smoothed success of the first, middle and last stage against generated tokens: colour by arm, dashes by stage."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    stages = sorted(curves)
    shown = dict.fromkeys([stages[0], stages[len(stages) // 2], stages[-1]])
    values = []
    for style, stage in zip(("-", "--", ":"), shown):
        for curve in curves[stage]:
            i = series_index(arms, curve.arm)
            x, y = zip(*smoothed(curve.points))
            axes.plot(x, y, color=theme.series[i], linestyle=style, linewidth=1.5)
            values += y
        axes.plot([], [], color=theme.muted, linestyle=style, label=f"stage {stage}")
    for arm in dict.fromkeys(curve.arm for found in curves.values() for curve in found):
        axes.plot([], [], color=theme.series[series_index(arms, arm)], linewidth=3, label=plot_text(arm))
    percent_axis(axes, values)
    token_axis(axes, theme)
    add_legend(axes, theme)
    return figure


def accuracy_plot(content: Content, theme: Theme, title: str) -> Figure:
    """Accuracy of every model with its interval, one block of rows a task."""
    columns = content.columns
    rows = [(column, content.cell(model, column)) for column in columns for model in content.models]
    rows = [(column, cell) for column, cell in rows if cell]
    figure, axes = new_axes(theme, title, WIDTH * 1.35, 0.9 + 0.26 * len(rows) + 0.2 * len(columns))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    y, ticks, labels, last = 0.0, [], [], None
    for column, cell in rows:
        if column != last:
            y += 0.9 if last else 0.0
            axes.text(0, y, plot_text(column_title(column, columns)), transform=axes.get_yaxis_transform(), fontsize=9,
                      color=theme.ink, fontweight="bold", va="center", ha="left", bbox=_patch(theme))  # fmt: skip
            y += 0.9
            last = column
        arm = cell.model in content.arms
        colour = theme.series[series_index(content.arms, cell.model)] if arm else theme.muted
        marker = MARKERS[series_index(content.arms, cell.model)] if arm else "o"
        axes.plot([cell.low, cell.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
        face = colour if arm else theme.paper
        axes.plot([cell.accuracy], [y], marker=marker, color=colour, markersize=6, markerfacecolor=face, clip_on=False)
        ticks.append(y)
        labels.append(plot_text(cell.model))
        y += 1.0
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_xlim(0, min(1.0, 1.08 * max(cell.high for _, cell in rows)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.3g} %"))
    return figure


def _patch(theme: Theme) -> dict:
    return {"facecolor": theme.paper, "edgecolor": "none", "pad": 1.5}


def importance_plot(importance: Importance, theme: Theme, title: str) -> Figure:
    """Share of a task's importance mass in its most important ranks."""
    figure, axes = new_axes(theme, title, WIDTH, HEIGHT)
    for i, task in enumerate(importance.tasks):
        n = len(task.cumulative)
        x = [0.0, *((k + 1) / n for k in range(n))]
        colour = theme.series[(i + 1) % len(theme.series)]
        axes.plot(x, [0.0, *task.cumulative], color=colour, linewidth=1.8, label=plot_text(task.task))
    axes.plot([0, 1], [0, 1], color=theme.muted, linewidth=1, linestyle=(0, (3, 3)), label="all ranks alike")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.3g} %"))
    axes.set_xlabel("ranks of the pool, most important first", color=theme.muted, fontsize=9)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink, loc="lower right", handlelength=1.6)
    return figure


def file_name(text: str) -> str:
    """`text` as a part of a file name."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in text)


def _picture(name: str, section: str, task: str | None, alt: str, dpi: int, draw: Callable[..., Figure]) -> Picture:
    return Picture(file_name(name), section, task, alt, png(draw(theme=LIGHT), dpi), png(draw(theme=DARK), dpi))


def curve_picture(content: Content, task: str, dpi: int) -> Picture | None:
    """The validation curves of one task; None where it was not validated."""
    curves = [curve for curve in content.training.validation if curve.task == task]
    if not curves:
        return None
    chosen = [checkpoint for checkpoint in content.training.checkpoints if checkpoint.task == task and checkpoint.point]
    draw = partial(validation_plot, curves, chosen, content.arms, title=f"{task}: validation accuracy")
    alt = f"Validation accuracy against generated tokens, {task}"
    return _picture(f"{task}-validation", "curves", task, alt, dpi, draw)


def _reward_picture(content: Content, task: str, dpi: int) -> Picture | None:
    curves = [curve for curve in content.training.reward if curve.task == task]
    if not curves:
        return None
    draw = partial(reward_plot, curves, content.arms, title=f"{task}: mean reward of a round")
    alt = f"Mean reward of the rollouts against generated tokens, {task}"
    return _picture(f"{task}-reward", "curves", task, alt, dpi, draw)


def _stage_picture(content: Content, task: str, dpi: int) -> Picture | None:
    if not any(cell.task == task for cell in content.training.stages):
        return None
    draw = partial(stage_plot, content, task, title=f"{task}: success by stage")
    alt = f"Sampled accuracy by stage, early and late in training, {task}"
    return _picture(f"{task}-stages", "stages", task, alt, dpi, draw)


def _stage_curves_picture(content: Content, task: str, dpi: int) -> Picture | None:
    found = content.training.stage_curves.items()
    curves = {stage: [curve for curve in all_tasks if curve.task == task] for stage, all_tasks in found}
    curves = {stage: chosen for stage, chosen in curves.items() if chosen}
    if len(curves) < 2:
        return None
    draw = partial(stage_curves_plot, curves, content.arms, title=f"{task}: success by stage over time")
    alt = f"Sampled accuracy by stage against generated tokens, {task}"
    return _picture(f"{task}-stage-curves", "stages", task, alt, dpi, draw)


def _revealed_picture(content: Content, task: str, dpi: int) -> Picture | None:
    curves = [curve for curve in content.training.revealed if curve.task == task]
    if not any(y for curve in curves for _, y in curve.points):
        return None
    draw = partial(revealed_plot, curves, content.arms, title=f"{task}: revealed share")
    alt = f"Revealed share of the demonstrations against generated tokens, {task}"
    return _picture(f"{task}-revealed", "stages", task, alt, dpi, draw)


TASK_PICTURES = (curve_picture, _reward_picture, _stage_picture, _stage_curves_picture, _revealed_picture)


def importance_picture(content: Content, dpi: int) -> Picture | None:
    """Share of the importance in the top ranks; None where nothing was composed."""
    if not content.importance:
        return None
    draw = partial(importance_plot, content.importance, title="Importance held by the top ranks")
    alt = "Share of the importance mass in the most important ranks, by task"
    return _picture("importance", "importance", None, alt, dpi, draw)


def pictures(content: Content, dpi: int = 200) -> list[Picture]:
    """All pictures that the content has numbers for."""
    found: list[Picture | None] = []
    if content.summary:
        title = f"Accuracy with {100 * content.request.confidence:.3g} % intervals"
        alt = "Accuracy of every model with its interval"
        found.append(_picture("accuracy", "accuracy", None, alt, dpi, partial(accuracy_plot, content, title=title)))
    for task in content.tasks:
        found += [make(content, task, dpi) for make in TASK_PICTURES]
    for cell in content.meta:
        draw = partial(meta_plots.cell_figure, cell, title=f"{cell.title}, seed {cell.seed}: meta-actions")
        name, alt = f"{cell.task}-{cell.arm}-{cell.seed}-actions", f"Figures of the meta-actions of {cell.title}"
        found.append(_picture(name, "meta_actions", cell.task, alt, min(dpi, 130), draw))
    found.append(importance_picture(content, dpi))
    return [picture for picture in found if picture]
