"""Load of the partitions by layer, and its entropy, as one figure."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sse_convert.results.figures.curves import COLOURS, blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TICKS = 16
"""of partitions along the axis"""


def router_load(layers: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw it.

    Args:
        layers: index, load (a share per partition), entropy (1 is even) and dead (partitions) of each.
    """
    width = max(6.0, min(16.0, 1.5 + 0.45 * len(layers))) + 5
    figure = blank_figure(width, 4.2)
    left, right = figure.subplots(1, 2)
    for axis in (left, right):
        axis.set_xlabel("layer")
        axis.set_xticks(range(len(layers)), [str(layer["index"]) for layer in layers])
    left.set_ylabel("partition")
    image = _loads(left, layers)
    figure.colorbar(image, ax=left, label="load, 1 is an even share", extend="max")
    right.plot([layer["entropy"] for layer in layers], "o-", color=COLOURS[1], markersize=4)
    right.grid(alpha=0.25, axis="y")
    right.set(ylim=(0, 1.02))
    right.set_title("entropy of the load, 1 is even", fontsize=9)
    return figure


def _loads(axis: "Axes", layers: Sequence[Mapping[str, Any]]) -> Any:
    """A column for each layer, with crosses on dead partitions, and figures where they are legible."""
    partitions = max(len(layer["load"]) for layer in layers)
    relative = [[share * len(layer["load"]) / sum(layer["load"]) for share in layer["load"]] for layer in layers]
    grid = [[(row[p] if p < len(row) else math.nan) for row in relative] for p in range(partitions)]
    image = axis.imshow(grid, vmin=0, vmax=2, cmap="PuOr", aspect="auto")
    axis.set_title("load (cross: dead)", fontsize=9)
    axis.set_yticks(range(0, partitions, -(-partitions // MOST_TICKS)))
    for x, (layer, row) in enumerate(zip(layers, relative, strict=True)):
        for p in layer["dead"]:
            axis.plot(x, p, "x", color="black")
        if partitions <= MOST_TICKS // 2 and len(layers) <= MOST_TICKS:
            for p, share in enumerate(row):
                colour = "black" if 0.4 < share < 1.6 else "white"
                axis.annotate(f"{share:.2f}", (x, p - 0.22), ha="center", fontsize=7, color=colour)
    return image
