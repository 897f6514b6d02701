"""Figures of an evaluation: loss by context, needles by depth, speed by length. The card's tables have the rest."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.intervals import or_nan
from sse_convert.results.figures.drawing import Drawing, legend_above, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK_CELL = 0.55
"""share from which the text in a cell of the heat map is white"""
STUDENT = "this model"
Models = Sequence[tuple[str, dict[str, Any]]]
"""names and scores, the teacher first"""


def curves(evaluation: Mapping[str, Any]) -> Iterator[Drawing]:
    """Loss by context, speed by length.

    Args:
        evaluation: of the result.
    """
    models = _models(evaluation)
    if models[-1][1]["held_out"]:
        yield _loss(models)
    if models[-1][1]["speed"]:
        yield _speed(models)


def heat_maps(evaluation: Mapping[str, Any]) -> Iterator[Drawing]:
    """Needles by depth and length, one picture per kind and number of keys, the teacher beside the student.

    Args:
        evaluation: of the result.
    """
    models = _models(evaluation)
    for kind, keys in dict.fromkeys((entry["kind"], entry["keys"]) for entry in models[-1][1]["needles"]):
        own = [(n, [e for e in s["needles"] if (e["kind"], e["keys"]) == (kind, keys)]) for n, s in models]
        yield _heat_map(kind, keys, own)


def length_label(tokens: float, _: float = 0) -> str:
    """Tick label: 64, 1K, 128K, 1M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"


def _models(evaluation: Mapping[str, Any]) -> Models:
    return [("teacher", evaluation["teacher"]), (STUDENT, evaluation["student"])]


def _loss(models: Models) -> Drawing:
    """Of the longest windows."""
    figure, (axis,) = new_figure()
    for i, (name, scores) in enumerate(models):
        longest = max(scores["held_out"], key=lambda entry: entry["length"])
        x = [bucket["stop"] for bucket in longest["buckets"]]
        y = [or_nan(bucket["loss"]) for bucket in longest["buckets"]]
        axis.plot(x, y, **style(i), label=f"{name} ({or_nan(longest['loss']):.3f})")
    axis.set(xlabel="tokens of context", ylabel="nats per token")
    _finish(axis)
    about = "Nats per token by the context a prediction could look back on; the legend has the mean."
    return Drawing(name="loss-by-context", title="Held-out loss by context", about=about, figure=figure)


def _heat_map(kind: str, keys: int, models: Sequence[tuple[str, list[Mapping[str, Any]]]]) -> Drawing:
    figure, axes = new_figure(4.6, 2.7, columns=len(models))
    for axis, (name, entries) in zip(axes, models, strict=True):
        entries = sorted(entries, key=lambda entry: entry["length"])
        depths = entries[0]["depths"]
        grid = [[_accuracy(entry["depths"][depth]) for entry in entries] for depth in range(len(depths))]
        axis.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for y, row in enumerate(grid):
            for x, share in enumerate(row):
                text = "-" if math.isnan(share) else f"{100 * share:.0f}"
                colour = "white" if share > DARK_CELL else "black"
                axis.annotate(text, (x, y), ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(entries)), [length_label(entry["length"]) for entry in entries])
        axis.set_yticks(
            range(len(depths)), [f"{100 * depth['start']:.0f}-{100 * depth['stop']:.0f}%" for depth in depths]
        )
        axis.set(title=name, xlabel="context (tokens)")
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("depth of the needle")
    for axis in axes[1:]:
        axis.set_yticklabels([])
    title = f"{kind} needles, {keys} key{'s' if keys > 1 else ''}: exact answers in percent"
    samples = models[-1][1][0]["depths"][0]["samples"]
    about = f"By context length and by the depth at which the needle stands; about {samples} samples a cell."
    return Drawing(name=f"needles-{kind}-{keys}", title=title, about=about, figure=figure)


def _accuracy(depth: Mapping[str, Any]) -> float:
    return math.nan if depth["accuracy"] is None else float(depth["accuracy"])


def _finish(axis: "Axes") -> None:
    """Lengths along x, a grid, and the legend above."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(length_label)
    axis.grid(alpha=0.5)
    legend_above(axis)


def _speed(models: Models) -> Drawing:
    figure, axes = new_figure(4.6, 3.1, columns=2)
    for axis, (title, key) in zip(
        axes, (("prefill", "prefill_tokens_per_s"), ("decoding", "decode_tokens_per_s")), strict=True
    ):
        for i, (name, scores) in enumerate(models):
            x = [entry["length"] for entry in scores["speed"]]
            y = [entry[key] for entry in scores["speed"]]
            axis.plot(x, y, **style(i), label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set(title=title, xlabel="context (tokens)")
        axis.xaxis.set_major_formatter(length_label)
        axis.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
        axis.grid(alpha=0.5)
    axes[0].set_ylabel("tokens per second")
    axes[1].legend(fontsize=8)
    return Drawing(
        name="speed-by-length",
        title="Speed by length",
        about="Tokens per second of one sequence: reading the prompt, and decoding at the end of the context.",
        figure=figure,
    )
