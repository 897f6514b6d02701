"""A picture of evaluation reports: loss, divergence, needles and cache bytes by length, as far as measured."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.errors import UsageError
from sse_convert.evaluation.intervals import or_nan, wilson
from sse_convert.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""teacher first; distinguishable with colour-blind eyes (Okabe and Ito)"""
MARKERS = ("s", "o", "^", "D", "v", "P", "X")
LINES = (":", "-", "--", "-.")
Models = Sequence[tuple[str, dict[str, Any]]]
"""names and scores, the teacher first"""


def plot(reports: Sequence[dict[str, Any]], path: Path, *, labels: Sequence[str] | None = None) -> None:
    """Draw one PNG from the JSON of one or several reports that share a teacher.

    Args:
        reports: `EvalReport.to_dict()` of each student; the teacher is drawn from the first.
        path: PNG file to write; an older one is replaced.
        labels: names of the students in the legend; unset uses their folder names.

    Raises:
        UsageError: no report, or as many labels as reports are not given.
        OutputError: the file cannot be written.
    """
    if not reports:
        raise UsageError("no report to plot", expected="at least one")
    if labels is not None and len(labels) != len(reports):
        raise UsageError(f"{len(labels)} labels for {len(reports)} reports", expected="one label per report")
    names = labels or [Path(report["student"]["name"]).name or "student" for report in reports]
    models = [("teacher", reports[0]["teacher"]), *((n, r["student"]) for n, r in zip(names, reports, strict=True))]
    panels: list[Callable[[Axes], None]] = [
        lambda axis: draw_loss(axis, models),
        lambda axis: draw_accuracy(axis, models),
        lambda axis: draw_cache(axis, reports, list(names)),
    ]
    if any(scores.get("agreement") for _, scores in models):
        panels.insert(1, lambda axis: draw_divergence(axis, models))
    figure = blank_figure(4.3 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels))
    for axis, draw in zip(axes, panels, strict=True):
        draw(axis)
        axis.grid(alpha=0.25)
        axis.xaxis.set_major_formatter(length_label)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.supxlabel(_conditions(reports[0]), fontsize=7, color="#555555")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


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
    """Held-out loss by context, of the longest windows.

    Args:
        axis: to draw on.
        models: names and scores, the teacher first.
    """
    axis.set(title="held-out loss")
    _by_context(axis, models, "held_out", "loss", lambda entry: f"{or_nan(entry['loss']):.3f}")


def _interval(correct: float, samples: float) -> tuple[float, float]:
    return wilson(correct, int(samples))


def draw_divergence(axis: "Axes", models: Models) -> None:
    """Divergence from the teacher by context, of the longest windows.

    Args:
        axis: to draw on.
        models: names and scores, the teacher first.
    """
    axis.set(title="KL(teacher || student)")
    _by_context(
        axis,
        models,
        "agreement",
        "kl",
        lambda entry: f"{or_nan(entry['kl']):.3f}, top-1 {or_nan(entry['top1']):.0%}",
    )


def _by_context(axis: "Axes", models: Models, key: str, quantity: str, mean: Callable[[dict[str, Any]], str]) -> None:
    """A quantity of the longest windows' buckets; the legend has its mean."""
    axis.set(xlabel="tokens of context (bucket end)", ylabel="nats per token")
    axis.set_xscale("log", base=2)
    for i, (name, scores) in enumerate(models):
        if scores.get(key):
            longest = max(scores[key], key=lambda entry: entry["length"])
            x = [bucket["stop"] for bucket in longest["buckets"]]
            y = [or_nan(bucket[quantity]) for bucket in longest["buckets"]]
            axis.plot(x, y, **style(i), label=f"{name} ({mean(longest)})")


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
            bounds = [[100 * bound for bound in _interval(*hits[length])] for length in x]
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


def _conditions(report: dict[str, Any]) -> str:
    parts = [f"{key} {value}" for key, value in report["conditions"].items() if isinstance(value, str | int | float)]
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > 170:
            lines.append("")
        lines[-1] += (" | " if lines[-1] else "") + part
    return "\n".join(lines)
