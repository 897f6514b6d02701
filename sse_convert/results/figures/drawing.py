"""A figure with its words, as PNG."""

import dataclasses as dc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73")
"""teacher first; distinguishable with colour-blind eyes (Okabe and Ito)"""
MARKERS = ("s", "o", "^", "D")
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
DPI = 150
LEGEND_WIDTH = 56
"""characters beside each other in a legend"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A figure and what it shows."""

    name: str
    """file name without its end"""
    title: str
    """heading"""
    about: str
    """what a reader who cannot see it would be told"""
    figure: "Figure"
    """drawn inside `styled`"""

    def write_png(self, path: Path) -> None:
        """Write the figure as a picture."""
        self.figure.savefig(path, format="png", dpi=DPI)


@contextmanager
def styled() -> Iterator[None]:
    """Figures made inside have the tool's style."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def style(i: int) -> dict[str, Any]:
    """How the curve of one model looks; 0 is the teacher."""
    return {"color": COLOURS[i], "marker": MARKERS[i], "markersize": 4}


def blank_figure(width: float, height: float) -> "Figure":
    """A figure that no window shows.

    Args:
        width: inches.
        height: inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_figure(width: float = 4.6, height: float = 3.1, columns: int = 1) -> tuple["Figure", list["Axes"]]:
    """An empty figure.

    Args:
        width: inches.
        height: inches.
        columns: plots side by side.
    """
    figure = blank_figure(width, height)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend_above(axis: "Axes") -> None:
    """A legend that covers nothing: above the plot, in as many columns as fit.

    Args:
        axis: without a title.
    """
    names = axis.get_legend_handles_labels()[1]
    columns = max(1, min(len(names), LEGEND_WIDTH // (max(map(len, names), default=1) + 5)))
    axis.legend(fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
