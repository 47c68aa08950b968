"""The pictures of meta-actions: one a cell, small panels over generated tokens, and the choices after each block."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from data.meta_actions.grammar import ACTIONS
from data.report.meta_actions import PANELS, MetaCell
from data.report.text import plot_text, short_count
from data.report.training import smoothed

SIZE = (12.0, 6.6)  # inches
COLUMNS = 3


def cell_figure(cell: MetaCell, theme, title: str) -> Figure:
    """All panels of one cell; a panel without figures says so."""
    figure = Figure(figsize=SIZE, facecolor=theme.paper, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plot_text(title), x=0.01, ha="left", color=theme.ink, fontsize=11, fontweight="bold")
    panels = figure.subplots(COLUMNS, COLUMNS)
    for axes, (name, figures) in zip(panels.flat, PANELS):
        _panel(axes, cell, name, figures, theme)
    _matrix(panels.flat[len(PANELS)], cell, theme)
    return figure


def _frame(axes, theme, name: str) -> None:
    axes.set_facecolor(theme.paper)
    axes.set_title(plot_text(name), loc="left", color=theme.ink, fontsize=9.5)
    axes.tick_params(colors=theme.muted, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)


def _panel(axes, cell: MetaCell, name: str, figures, theme) -> None:
    _frame(axes, theme, name)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    drawn = False
    for i, (figure, label) in enumerate(figures):
        points = cell.series.get(figure)
        if not points:
            continue
        colour = theme.series[(i + 1) % len(theme.series)]
        x, y = zip(*smoothed(points))
        axes.plot(x, y, color=colour, linewidth=1.6, label=plot_text(label))
        drawn = True
    if not drawn:
        axes.text(0.5, 0.5, "none in this arm", transform=axes.transAxes, ha="center", color=theme.muted, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), high)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_count(x)))
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.ink, loc="best", handlelength=1.2)


def _matrix(axes, cell: MetaCell, theme) -> None:
    _frame(axes, theme, "choice after each block")
    rows = cell.matrix()
    accent = theme.series[1]
    for y, (_, shares) in enumerate(rows):
        for x, action in enumerate(ACTIONS):
            if action in shares:
                axes.add_patch(_square(x, y, accent, shares[action]))
                axes.text(x, y, f"{100 * shares[action]:.0f}", ha="center", va="center", fontsize=8, color=theme.ink)
    axes.set_xlim(-0.5, len(ACTIONS) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(ACTIONS)), ACTIONS)
    axes.set_yticks(range(len(rows)), [state.replace("_", " ") for state, _ in rows])


def _square(x: float, y: float, colour: str, share: float):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=colour, alpha=0.08 + 0.6 * share, edgecolor="none")
