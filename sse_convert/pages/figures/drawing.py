"""A figure with its words, as SVG whose colours follow the page, or as PNG."""

import dataclasses as dc
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from sse_convert.evaluation.plot import COLOURS, blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, LINE = "#010203", "#040506"
"""stand-ins for the page's text and line colours, which no figure uses otherwise"""
VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    **{colour: f"var(--s{i})" for i, colour in enumerate(COLOURS)},
}
_BOXES = ("boxprops", "whiskerprops", "capprops", "flierprops")
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sse-convert",
}
_ON_A_PAGE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK),
    **dict.fromkeys((f"boxplot.{part}.color" for part in _BOXES), INK),
    "grid.color": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
POINTS_AS_VECTORS = 200
"""a cloud of more points is stored as a picture"""
DPI = 150
IMAGE_DPI = 110
"""of pictures inside an SVG: a page with many layers stays small"""
NARROW = 440
"""points; a wider figure has a row to itself"""
LEGEND_WIDTH = 56
"""characters beside each other in a legend"""
LONGEST_LABEL = 28
"""characters of a name in a figure"""


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

    def svg(self) -> Markup:
        """The figure as an element for a page: no prolog, ids of its own, colours as CSS variables."""
        _rasterise(self.figure)
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg", dpi=IMAGE_DPI, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r' id="image[^"]*"', "", text)  # pictures alike have ids alike, and nothing refers to them
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, variable)
        label = escape(f"{self.title}. {self.about}")
        return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))

    @property
    def width(self) -> int:
        """Points."""
        return round(72 * self.figure.get_figwidth())

    def write_png(self, path: Path) -> None:
        """Write the figure as a picture."""
        self.figure.savefig(path, format="png", dpi=DPI)


@contextmanager
def styled(*, page: bool) -> Iterator[None]:
    """Figures made inside have the tool's style.

    Args:
        page: transparent, in the colours that `Drawing.svg` replaces; otherwise dark on white.
    """
    import matplotlib

    with matplotlib.rc_context({**_STYLE, **(_ON_A_PAGE if page else {})}):
        yield


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


def plain(label: str) -> str:
    """A label from data: no mathematics, and not longer than a legend has room for."""
    if len(label) > LONGEST_LABEL:
        end = LONGEST_LABEL // 2
        label = f"{label[: end - 1]}\N{HORIZONTAL ELLIPSIS}{label[-end:]}"
    return label.replace("$", r"\$")


def untitled(figure: "Figure") -> str:
    """Take the title off a figure, for a page that has headings; returns it."""
    title = figure.get_suptitle()
    if title:
        figure.suptitle("")
    return title


def _rasterise(figure: "Figure") -> None:
    from matplotlib.collections import PathCollection

    for cloud in figure.findobj(PathCollection):
        if len(cloud.get_offsets()) > POINTS_AS_VECTORS:  # type: ignore[arg-type]
            cloud.set_rasterized(True)
