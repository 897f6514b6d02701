"""Figures of an analysis, one PNG per quantity, after the paper's."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sse_convert.evaluation.plot import COLOURS, blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Layer = Mapping[str, Any]
"""an entry of `layers` in the report"""
Arrays = Mapping[str, Tensor]

SPARSE, SHARED, TEACHER = COLOURS[1], COLOURS[2], COLOURS[0]
COLUMNS = 4
"""panels side by side"""
ROWS_COLOURED = 6
"""state rows with a colour of their own in the clustering figure; the others are grey"""
PARTITIONS_SHOWN = 8
"""partitions in a panel of the token figure"""
LONGEST_TOKEN = 9
"""characters of a token in a picture"""
DPI = 120
CHARACTERS_PER_INCH = 16
"""of the line below a figure"""


def draw(report: Mapping[str, Any], arrays: Arrays, folder: Path) -> list[str]:
    """Draw what the report has.

    Args:
        report: `AnalysisReport.to_dict()`.
        arrays: content of `arrays.safetensors`.
        folder: gets the PNG files.

    Returns:
        Names of the files.
    """
    drawn: list[str] = []
    for name, figure in figures(report["layers"], arrays):
        width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
        figure.supxlabel(textwrap.fill(_conditions(report), width), fontsize=7, color="#555555")
        figure.savefig(folder / f"{name}.png", dpi=DPI, format="png")
        drawn.append(f"{name}.png")
    return drawn


def figures(layers: Sequence[Layer], arrays: Arrays) -> Iterator[tuple[str, "Figure"]]:
    """The figures of what the layers have, by name, one after the other.

    Args:
        layers: entries of `layers` in the report.
        arrays: content of `arrays.safetensors`.
    """
    for name, (needs, figure_of) in _FIGURES.items():
        having = [layer for layer in layers if needs in layer]
        if having:
            yield name, figure_of(having, arrays)


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
    layers: list[Layer], title: str, width: float, height: float, columns: int = COLUMNS
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


def _entropy(layers: list[Layer], arrays: Arrays) -> "Figure":
    figure, (axis,) = _by_layer(layers, "Singular value entropy of the states", "entropy (1: all directions alike)")
    for x, layer in enumerate(layers):
        y = [math.nan if value is None else value for value in layer["entropy"]["partitions"]]
        label = "each partition" if x == 0 else None
        axis.scatter([x] * len(y), y, s=14, color=COLOURS[6], label=label, zorder=2)
    lines = (("all stacked", "stacked", TEACHER), ("partitions stacked", "sparse_stacked", SPARSE))
    for label, key, colour in (*lines, ("shared partition", "shared", SHARED)):
        y = _values(layers, "entropy", key)
        if _any(y):
            axis.plot(y, "o-", color=colour, markersize=4, label=label)
    axis.set_ylim(0, 1.02)
    axis.legend(fontsize=8)
    return figure


def _similarity(layers: list[Layer], arrays: Arrays) -> "Figure":
    figure, axes = _panels(layers, "|cosine| of state rows, mean over heads", 2.7, 2.6)
    for axis, layer in zip(axes, layers, strict=True):
        states = layer["partitions"] + layer["shared"]
        array = arrays.get(f"layers.{layer['index']}.similarity.matrix")
        blocks = [[math.nan if x is None else x for x in row] for row in layer["similarity"]["absolute"]]
        matrix = blocks if array is None else array.tolist()
        size = len(matrix) / states
        image = axis.imshow(matrix, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        for p in range(1, states):
            axis.axhline(p * size - 0.5, color="white", linewidth=0.6)
            axis.axvline(p * size - 0.5, color="white", linewidth=0.6)
        names = [str(p) for p in range(layer["partitions"])] + ["shared"] * layer["shared"]
        step = -(-states // 8)
        ticks = [(p + 0.5) * size - 0.5 for p in range(0, states, step)]
        axis.set_xticks(ticks, names[::step], fontsize=7)
        axis.set_yticks(ticks, names[::step], fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="|cosine|")
    return figure


def _row_sparsity(layers: list[Layer], arrays: Arrays) -> "Figure":
    threshold = layers[0]["row_sparsity"]["threshold"]
    label = rf"channels of $\phi(k)$ under {threshold:g} (%)"
    figure, (axis,) = _by_layer(layers, "Row sparsity of the state update", label)
    _bars(axis, layers, "row_sparsity", 100)
    return figure


def _bars(axis: "Axes", layers: list[Layer], quantity: str, factor: float) -> None:
    """Two bars per layer: partitions and shared partition."""
    parts = [("partitions", "sparse", SPARSE), ("shared partition", "shared", SHARED)]
    drawn = [(label, _values(layers, quantity, key), colour) for label, key, colour in parts]
    drawn = [part for part in drawn if _any(part[1])]
    width = 0.8 / len(drawn)
    for i, (label, y, colour) in enumerate(drawn):
        x = [place + (i - (len(drawn) - 1) / 2) * width for place in range(len(layers))]
        bars = axis.bar(x, [factor * value for value in y], width, color=colour, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=6)
    axis.set_ylim(0, max(1.0, 1.2 * axis.get_ylim()[1]))
    axis.legend(fontsize=8)


def _receptive_field(layers: list[Layer], arrays: Arrays) -> "Figure":
    about = layers[0]["receptive_field"]
    title = f"Receptive field over the last {about['window']} tokens, gates down to {about['threshold']:g}"
    figure, (axis,) = _by_layer(layers, title, "tokens (box: half of the channels)")
    for i, (name, key, colour) in enumerate((("partitions", "sparse", SPARSE), ("shared partition", "shared", SHARED))):
        found = [(x, arrays.get(f"layers.{layer['index']}.receptive_field.{key}")) for x, layer in enumerate(layers)]
        widths = [(x + (i - 0.5) * 0.36, array.flatten().tolist()) for x, array in found if array is not None]
        if widths:
            drawn = axis.boxplot(
                [values for _, values in widths],
                positions=[x for x, _ in widths],
                widths=0.3,
                whis=(0, 100),
                patch_artist=True,
                manage_ticks=False,
                medianprops={"color": "black"},
            )
            for box in drawn["boxes"]:
                box.set_facecolor(colour)
            drawn["boxes"][0].set_label(name)
    axis.set_yscale("symlog", base=2, linthresh=1)
    low, high = axis.get_ylim()
    axis.set_ylim(0 if low < 1 else 2 ** math.floor(math.log2(low)), 2 * high)
    axis.yaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
    axis.legend(fontsize=8, loc="upper right", ncols=2)
    return figure


def _routing(layers: list[Layer], arrays: Arrays) -> "Figure":
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


def _tokens(layers: list[Layer], arrays: Arrays) -> "Figure":
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


def _clustering(layers: list[Layer], arrays: Arrays) -> "Figure":
    figure, axes = _panels(
        layers, "Values of head 0 by the state row (partition:row) they go to, the most used rows in colour", 2.8, 2.8
    )
    for axis, layer in zip(axes, layers, strict=True):
        points, row, partition = (
            arrays[f"layers.{layer['index']}.clustering.{name}"] for name in ("points", "row", "partition")
        )
        place = partition.long() * layer["head_dim"] + row.long()
        used, counts = place.unique(return_counts=True)
        order = used[counts.argsort(descending=True, stable=True)].tolist()
        x, y = points.T.tolist()
        axis.scatter(x, y, s=2, color="#cccccc")
        for i, key in enumerate(order[:ROWS_COLOURED]):
            label = f"{key // layer['head_dim']}:{key % layer['head_dim']}" if layer["partitions"] > 1 else str(key)
            x, y = points[place == key].T.tolist()
            axis.scatter(x, y, s=5, color=COLOURS[1 + i], label=label)
        shares = "+".join(f"{share:.0%}" for share in layer["clustering"]["plane_share"])
        explained = layer["clustering"]["explained_by_head"][0]
        rows = "nothing" if explained is None else f"{explained:.0%}"
        axis.set_xlabel(f"rows explain {rows}, plane {shares}", fontsize=7)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.legend(fontsize=6, markerscale=1.5, handletextpad=0.1, loc="best")
    return figure


def _branches(layers: list[Layer], arrays: Arrays) -> "Figure":
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


def _output_error(layers: list[Layer], arrays: Arrays) -> "Figure":
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


def _memory(layers: list[Layer], arrays: Arrays) -> "Figure":
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


_FIGURES: dict[str, tuple[str, Callable[[list[Layer], Arrays], "Figure"]]] = {
    "entropy": ("entropy", _entropy),
    "similarity": ("similarity", _similarity),
    "row_sparsity": ("row_sparsity", _row_sparsity),
    "receptive_field": ("receptive_field", _receptive_field),
    "routing": ("routing", _routing),
    "tokens": ("tokens", _tokens),
    "clustering": ("clustering", _clustering),
    "branches": ("branches", _branches),
    "output_error": ("output_error", _output_error),
    "memory": ("attention", _memory),
}
"""file -> the quantity it needs and what draws it"""


def _conditions(report: Mapping[str, Any]) -> str:
    c = report["conditions"]
    text = f"{c['tokens']:,} tokens of {Path(c['text']).name} in rows of {c['length']:,}"
    return f"{report['model']} | {text} | {c['device']}, {c['dtype']}"
