"""Curves of evaluation reports: loss, needles and cache bytes by length."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.intervals import or_nan, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""teacher first; distinguishable with colour-blind eyes (Okabe and Ito)"""
MARKERS = ("s", "o", "^", "D", "v", "P", "X")
LINES = (":", "-", "--", "-.")
Models = Sequence[tuple[str, dict[str, Any]]]
"""names and scores, the teacher first"""


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


def draw_loss(axis: "Axes", models: Models) -> None:
    """Held-out loss by context, of the longest windows; the legend has its mean.

    Args:
        axis: to draw on.
        models: names and scores, the teacher first.
    """
    axis.set(title="held-out loss", xlabel="tokens of context (bucket end)", ylabel="nats per token")
    axis.set_xscale("log", base=2)
    for i, (name, scores) in enumerate(models):
        if scores["held_out"]:
            longest = max(scores["held_out"], key=lambda entry: entry["length"])
            x = [bucket["stop"] for bucket in longest["buckets"]]
            y = [or_nan(bucket["loss"]) for bucket in longest["buckets"]]
            axis.plot(x, y, **style(i), label=f"{name} ({or_nan(longest['loss']):.3f})")


def style(i: int) -> dict[str, Any]:
    """How the curve of one model looks.

    Args:
        i: its number; 0 is the teacher.
    """
    return {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "markersize": 4}


def draw_accuracy(axis: "Axes", models: Models) -> None:
    """Shares of needles found by length, over all settings, with 95% intervals.

    Args:
        axis: to draw on.
        models: names and scores, the teacher first.
    """
    axis.set(title="needle retrieval", xlabel="context (tokens)", ylabel="exact answers (%)", ylim=(-3, 103))
    axis.set_xscale("log", base=2)
    for i, (name, scores) in enumerate(models):
        hits: dict[int, list[float]] = defaultdict(lambda: [0, 0])
        for entry in scores["needles"]:
            hits[entry["length"]][0] += entry["correct"]
            hits[entry["length"]][1] += entry["samples"]
        if hits:
            x = sorted(hits)
            y = [100 * hits[length][0] / hits[length][1] for length in x]
            bounds = [[100 * bound for bound in wilson(hits[length][0], int(hits[length][1]))] for length in x]
            errors = [
                [v - low for v, (low, _) in zip(y, bounds, strict=True)],
                [high - v for v, (_, high) in zip(y, bounds, strict=True)],
            ]
            apart = [length * 1.03**i for length in x]  # so that equal results stay visible
            axis.errorbar(apart, y, yerr=errors, label=name, capsize=3, **style(i))


def draw_cache(axis: "Axes", reports: Sequence[dict[str, Any]], names: list[str]) -> None:
    """Bytes of cache and state by length.

    Args:
        axis: to draw on.
        reports: one per student; the teacher is that of the first.
        names: of the students.
    """
    axis.set(title="cache of one sequence", xlabel="context (tokens)", ylabel="bytes", yscale="log")
    axis.set_xscale("log", base=2)
    rows = reports[0]["cache"]
    lengths = [row["length"] for row in rows]
    if rows:
        y = [row["teacher_bytes"] for row in rows]
        axis.plot(lengths, y, **style(0), label="teacher")
    for i, (name, report) in enumerate(zip(names, reports, strict=True), start=1):
        if report["cache"]:
            x = [row["length"] for row in report["cache"]]
            y = [row["student_bytes"] for row in report["cache"]]
            axis.plot(x, y, LINES[i % 4], **style(i), label=name)


def length_label(tokens: float, _: float = 0) -> str:
    """Tick label: 64, 1K, 128K, 1M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"
