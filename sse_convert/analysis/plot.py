"""Figures of an analysis, one PNG per quantity."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.plot import COLOURS, blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Layer = Mapping[str, Any]
"""an entry of `layers` in the report"""

SPARSE, SHARED, TEACHER = COLOURS[1], COLOURS[2], COLOURS[0]
PARTITIONS_SHOWN = 8
"""partitions in a panel of the token figure"""
LONGEST_TOKEN = 9
"""characters of a token in a picture"""
DPI = 120
CHARACTERS_PER_INCH = 16
"""of the line below a figure"""


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what the report has.

    Args:
        report: `AnalysisReport.to_dict()`.
        folder: gets the PNG files.

    Returns:
        Names of the files.
    """
    drawn: list[str] = []
    for name, figure in figures(report["layers"]):
        width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
        figure.supxlabel(textwrap.fill(_conditions(report), width), fontsize=7, color="#555555")
        figure.savefig(folder / f"{name}.png", dpi=DPI, format="png")
        drawn.append(f"{name}.png")
    return drawn


def figures(layers: Sequence[Layer]) -> Iterator[tuple[str, "Figure"]]:
    """The figures of what the layers have, by name, one after the other.

    Args:
        layers: entries of `layers` in the report.
    """
    for name, (needs, figure_of) in _FIGURES.items():
        having = [layer for layer in layers if needs in layer]
        if having:
            yield name, figure_of(having)


def _new(width: float, height: float, title: str) -> "Figure":
    figure = blank_figure(width, height)
    figure.suptitle(title)
    return figure


def _by_layer(layers: list[Layer], title: str, label: str, columns: int = 1) -> tuple["Figure", list["Axes"]]:
    """One or several plots with the layers along x."""
    width = max(6.0, min(16.0, 1.5 + 0.45 * len(layers))) + 5 * (columns - 1)
    figure = _new(width, 4.2, title)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.set_xlabel("layer")
        axis.set_xticks(range(len(layers)), [_layer_name(layer) for layer in layers])
        axis.grid(alpha=0.25, axis="y")
    axes[0].set_ylabel(label)
    return figure, axes


def _panels(
    layers: list[Layer], title: str, width: float, height: float, columns: int
) -> tuple["Figure", list["Axes"]]:
    """One panel per layer."""
    columns = min(columns, len(layers))
    rows = -(-len(layers) // columns)
    figure = _new(max(width * columns, 5.0) + 1, height * rows + 0.9, title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, layer in zip(axes, layers, strict=False):
        axis.set_title(f"layer {layer['index']} ({layer['mixer']})", fontsize=9)
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
    return figure, axes[: len(layers)]


def _layer_name(layer: Layer) -> str:
    return str(layer["index"]) + ("" if "partitions" in layer else f"\n{layer['mixer']}")


def _values(layers: list[Layer], quantity: str, *keys: str) -> list[float]:
    """A number of each layer, NaN where there is none."""
    found = []
    for layer in layers:
        value = layer.get(quantity)
        for key in keys:
            value = None if value is None else value[key]
        found.append(math.nan if value is None else float(value))
    return found


def _any(values: list[float]) -> bool:
    return any(not math.isnan(value) for value in values)


def _routing(layers: list[Layer]) -> "Figure":
    figure, (left, right) = _by_layer(layers, "Routing", "partition", columns=2)
    partitions = max(layer["partitions"] for layer in layers)
    relative = [
        [share * len(layer["routing"]["load"]) / sum(layer["routing"]["load"]) for share in layer["routing"]["load"]]
        for layer in layers
    ]
    grid = [[(row[p] if p < len(row) else math.nan) for row in relative] for p in range(partitions)]
    image = left.imshow(grid, vmin=0, vmax=2, cmap="PuOr", aspect="auto")
    figure.colorbar(image, ax=left, label="load, 1 is an even share", extend="max")
    left.grid(visible=False)
    left.set_title("load (cross: dead)", fontsize=9)
    left.set_yticks(range(0, partitions, -(-partitions // 16)))
    for x, layer in enumerate(layers):
        for p in layer["routing"]["dead"]:
            left.plot(x, p, "x", color="black")
    if partitions <= 8 and len(layers) <= 16:
        for x, row in enumerate(relative):
            for p, share in enumerate(row):
                colour = "black" if 0.4 < share < 1.6 else "white"
                left.annotate(f"{share:.2f}", (x, p - 0.22), ha="center", fontsize=7, color=colour)
    for label, key, colour in (("of the load", "load_entropy", SPARSE), ("of the gate e", "gate_entropy", SHARED)):
        if _any(y := _values(layers, "routing", key)):
            right.plot(y, "o-", color=colour, markersize=4, label=label)
    right.set(title="entropy, 1 is even", ylim=(0, 1.02))
    right.title.set_fontsize(9)
    right.legend(fontsize=8)
    return figure


def _tokens(layers: list[Layer]) -> "Figure":
    shown = min(PARTITIONS_SHOWN, max(layer["partitions"] for layer in layers))
    ranks = max(len(top) for layer in layers for top in layer["tokens"]["top"])
    title = "Tokens that set each partition apart, and the share of their occurrences that goes there"
    figure, axes = _panels(layers, title, 0.4 + 0.85 * shown, 0.8 + 0.2 * ranks, columns=max(1, 12 // shown))
    for axis, layer in zip(axes, layers, strict=True):
        grid = [[math.nan] * min(shown, layer["partitions"]) for _ in range(ranks)]
        for p, top in enumerate(layer["tokens"]["top"][:shown]):
            for rank, token in enumerate(top):
                grid[rank][p] = share = token["count"] / token["of"]
                label = f"{_printable(token['text'])} {share:.0%}"
                axis.annotate(label, (p, rank), ha="center", va="center", fontsize=6, color="black")
        axis.imshow(grid, vmin=0, vmax=1.6, cmap="Blues", aspect="auto")
        axis.set_xticks(range(len(grid[0])))
        axis.set_yticks([])
        axis.set_xlabel("partition", fontsize=7)
        axis.tick_params(labelsize=7)
    return figure


def _printable(text: str) -> str:
    """A token for a picture: quoted, short, without control characters, mathematics or what the font lacks."""
    plain = repr(text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "\N{HORIZONTAL ELLIPSIS}")
    return "".join(c if ord(c) < 0x250 or c == "\N{HORIZONTAL ELLIPSIS}" else "?" for c in plain).replace("$", r"\$")


def _branches(layers: list[Layer]) -> "Figure":
    figure, (left, right) = _by_layer(layers, "Branches before the output norm", "root mean square", columns=2)
    for label, key, colour in (("partitions", "sparse_rms", SPARSE), ("shared partition", "shared_rms", SHARED)):
        left.plot(_values(layers, "branches", key), "o-", color=colour, markersize=4, label=label)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    left.yaxis.set_minor_formatter(lambda size, _: f"{size:g}" if f"{size:e}"[0] in "25" else "")
    left.legend(fontsize=8)
    for x, layer in enumerate(layers):
        y = [100 * (share or 0) for share in layer["branches"]["sparse_share_by_head"]]
        right.scatter([x] * len(y), y, s=14, color=COLOURS[6], zorder=3, label="each head" if x == 0 else None)
    total = [100 * share for share in _values(layers, "branches", "sparse_share")]
    right.plot(total, "o-", color=SPARSE, markersize=4, label="all heads")
    right.set_ylabel("partitions' part of the power (%)")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    return figure


def _output_error(layers: list[Layer]) -> "Figure":
    title = "Output error of each converted layer, given its teacher's inputs"
    figure, (axis,) = _by_layer(layers, title, "squared error / teacher's power")
    names = sorted({layer["mixer"] for layer in layers})
    for i, name in enumerate(names):
        own = [(x, layer["output_error"]["relative"]) for x, layer in enumerate(layers) if layer["mixer"] == name]
        heights = [math.nan if y is None else y for _, y in own]
        bars = axis.bar([x for x, _ in own], heights, 0.6, color=COLOURS[1 + i % 6], label=name)
        axis.bar_label(bars, fmt="%.2g", fontsize=7)
    axis.axhline(1, color=TEACHER, linestyle=":", linewidth=1, label="no output at all")
    axis.legend(fontsize=8)
    return figure


def _memory(layers: list[Layer]) -> "Figure":
    title = "Attention distance of the teacher, half-lives of the student"
    figure, (axis,) = _by_layer(layers, title, "tokens of text")
    for x, layer in enumerate(layers):
        y = layer["attention"]["distance"]
        label = "teacher: mean attention distance of a head" if x == 0 else None
        axis.scatter([x - 0.25] * len(y), y, s=14, color=TEACHER, label=label)
    parts = ((0.0, "half-life, partitions", "sparse", SPARSE), (0.25, "half-life, shared partition", "shared", SHARED))
    for shift, label, key, colour in parts:
        middle, low, high = (_values(layers, "half_life", key, level) for level in ("median", "p10", "p90"))
        if _any(middle):
            spread = [
                [m - lo for m, lo in zip(middle, low, strict=True)],
                [hi - m for m, hi in zip(middle, high, strict=True)],
            ]
            places = [x + shift for x in range(len(layers))]
            style: dict[str, Any] = {"fmt": "o", "color": colour, "markersize": 4, "capsize": 2}
            axis.errorbar(places, middle, yerr=spread, label=f"{label} (80% of the channels)", **style)
    axis.set_yscale("log", base=2)
    axis.set_ylim(top=16 * axis.get_ylim()[1])  # room for the legend
    axis.yaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
    axis.legend(fontsize=7, loc="upper left")
    return figure


_FIGURES: dict[str, tuple[str, Callable[[list[Layer]], "Figure"]]] = {
    "routing": ("routing", _routing),
    "tokens": ("tokens", _tokens),
    "branches": ("branches", _branches),
    "output_error": ("output_error", _output_error),
    "memory": ("attention", _memory),
}
"""file -> the quantity it needs and what draws it"""


def _conditions(report: Mapping[str, Any]) -> str:
    c = report["conditions"]
    text = f"{c['tokens']:,} tokens of {Path(c['text']).name} in rows of {c['length']:,}"
    return f"{report['model']} | {text} | {c['device']}, {c['dtype']}"
