"""Figure mqa_topk: accuracy by model dimension, dense and row-sparse, a panel for each mixer and setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paper.row_sparse.results import Cell
from sse_convert.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"dense": ("#444444", "s", "--"), "row-sparse": ("#0072b2", "o", "-")}
"""colour, marker and line; told apart without colours too"""
SETTINGS = {False: "setting 1: zeros", True: "setting 2: noise"}


def draw(cells: Sequence[Cell], path: Path, *, conditions: str) -> None:
    """Write the PNG: means over seeds as lines, each seed as a dot.

    Args:
        cells: of any number of mixers, settings and widths.
        path: file to write; an older one is replaced.
        conditions: what was run on what, printed below.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mixers = list(dict.fromkeys(cell.mixer for cell in cells))
    figure = Figure(figsize=(1.5 + 3.2 * len(mixers), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(mixers), squeeze=False, sharex=True, sharey=True)
    for row, noise in enumerate(SETTINGS):
        for column, mixer in enumerate(mixers):
            _panel(axes[row, column], [cell for cell in cells if cell.curve == (mixer, noise)])
            axes[row, column].set_title(f"{mixer}, {SETTINGS[noise]}", fontsize=10)
    axes[0, 0].set_xticks(sorted({cell.width for cell in cells}))  # of all panels, which share the axis
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel(f"model dimension\n{conditions}", fontsize=8)
    figure.supylabel("recall (%)", fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _panel(axis: "Axes", cells: Sequence[Cell]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_ylim(-3, 103)
    axis.grid(alpha=0.25)
    axis.xaxis.set_major_formatter(lambda width, _: f"{width:g}")
    for name, (colour, marker, line) in STYLES.items():
        own = sorted((c for c in cells if (c.rows is None) == (name == "dense")), key=lambda c: c.width)
        axis.plot([c.width for c in own], [100 * c.accuracy.mean for c in own], line, color=colour, label=name)
        for cell in own:
            seeds = cell.accuracy.by_seed
            axis.plot([cell.width] * len(seeds), [100 * x for x in seeds], marker, color=colour, markersize=4)
