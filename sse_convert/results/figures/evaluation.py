"""Figures of an evaluation: loss by context, needles by length and depth, cache and speed by length."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.intervals import or_nan, wilson
from sse_convert.report import format_bytes
from sse_convert.results.figures.drawing import Drawing, legend_above, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK_CELL = 0.55
"""share from which the text in a cell of the heat map is white"""
STUDENT = "this model"
Models = Sequence[tuple[str, dict[str, Any]]]
"""names and scores, the teacher first"""


def curves(evaluation: Mapping[str, Any]) -> Iterator[Drawing]:
    """Loss by context, needles by length.

    Args:
        evaluation: of the result.
    """
    models = _models(evaluation)
    if models[-1][1]["held_out"]:
        yield _loss(models)
    if models[-1][1]["needles"]:
        yield _needles(models)


def resource_drawings(evaluation: Mapping[str, Any]) -> Iterator[Drawing]:
    """Cache and speed by length.

    Args:
        evaluation: of the result.
    """
    if evaluation["cache"]:
        yield _cache(evaluation["cache"])
    if evaluation["student"]["speed"]:
        yield _speed(_models(evaluation))


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


def _needles(models: Models) -> Drawing:
    figure, (axis,) = new_figure()
    for i, (name, scores) in enumerate(models):
        hits: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for entry in scores["needles"]:
            hits[entry["length"]][0] += entry["correct"]
            hits[entry["length"]][1] += entry["samples"]
        x = sorted(hits)
        y = [100 * hits[length][0] / hits[length][1] for length in x]
        bounds = [[100 * bound for bound in wilson(*hits[length])] for length in x]
        errors = [[abs(v - pair[end]) for v, pair in zip(y, bounds, strict=True)] for end in (0, 1)]
        apart = [length * 1.03**i for length in x]  # so that equal results stay visible
        axis.errorbar(apart, y, yerr=errors, label=name, capsize=3, **style(i))
    lengths = [entry["length"] for entry in models[-1][1]["needles"]]
    axis.set(xlabel="context (tokens)", ylabel="exact answers (%)", ylim=(-3, 103))
    _finish(axis)
    axis.set(xlim=(min(lengths) / 1.5, max(lengths) * 1.5))
    about = "Exact answers by context length, all kinds and numbers of keys together; bars are 95% intervals."
    return Drawing(name="needles-by-length", title="Needles found by length", about=about, figure=figure)


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


def _cache(rows: Sequence[Mapping[str, Any]]) -> Drawing:
    figure, (axis,) = new_figure()
    named = (("teacher", "teacher_bytes"), (STUDENT, "student_bytes"), ("of it, SSE states", "student_state_bytes"))
    for i, (name, key) in enumerate(named):
        if any(row[key] for row in rows):
            axis.plot([row["length"] for row in rows], [row[key] for row in rows], "-", **style(i), label=name)
    axis.set(xlabel="context (tokens)", ylabel="bytes", yscale="log")
    axis.yaxis.set_major_formatter(lambda size, _: format_bytes(size))
    _finish(axis)
    about = "Bytes of one sequence by context length, from the formula; both axes are logarithmic."
    return Drawing(name="cache-by-length", title="Cache and state by length", about=about, figure=figure)


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
