"""Figures of training: the loss of each stage."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sse_convert.report import format_number
from sse_convert.results.collect import RunStep
from sse_convert.results.figures.drawing import COLOURS, Drawing, legend_above, new_figure

POINTS = 200
"""of a curve; longer logs are averaged"""
LOG_FROM = 20.0
"""ratio of the largest to the smallest loss from which the axis is logarithmic"""
LOSS_NAMES = {"layer_mse": "error of the layers", "kl": "KL to the teacher (nats)", "ce": "cross entropy (nats)"}


def loss_curves(steps: Sequence[RunStep]) -> Iterator[Drawing]:
    """One curve per stage that has a log.

    Args:
        steps: training stages, in order.
    """
    for step in steps:
        if any(record["loss"] is not None for record in step.metrics):
            yield _loss(step)


def averaged(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float], int]:
    """A curve of at most `POINTS` points: tokens, means of `key`, and how many steps a point is the mean of."""
    found = [(record["tokens"], record[key]) for record in records if record.get(key) is not None]
    size = max(1, -(-len(found) // POINTS))
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    return [group[-1][0] for group in groups], [sum(y for _, y in group) / len(group) for group in groups], size


def _loss(step: RunStep) -> Drawing:
    figure, (axis,) = new_figure()
    x, y, size = averaged(step.metrics, "loss")
    layers = [key for key in step.metrics[0] if key.startswith("error_")]
    if len(layers) > 1:
        curves = [averaged(step.metrics, key)[1] for key in layers]
        if all(len(curve) == len(x) for curve in curves):
            low, high = ([end(values) for values in zip(*curves, strict=True)] for end in (min, max))
            axis.fill_between(x, low, high, color=COLOURS[1], alpha=0.2, linewidth=0, label="smallest to largest")
    looks_x, looks_y, _ = averaged(step.metrics, "valid_kl" if "valid_kl" in step.metrics[0] else "valid_loss")
    label = "mean over layers" if layers else "training" if looks_y else None
    axis.plot(x, y, color=COLOURS[1], linewidth=1.2, label=label)
    if looks_y:
        axis.plot(looks_x, looks_y, "o-", color=COLOURS[2], markersize=3, linewidth=1.2, label="held-out text")
    if label:
        legend_above(axis)
    kind = _kind(step)
    axis.set(xlabel="tokens", ylabel=LOSS_NAMES.get(kind, "loss"))
    if min(y) > 0 and max(y) > LOG_FROM * min(y):
        axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda tokens, _: format_number(tokens))
    axis.grid(alpha=0.5)
    mean = f", each point the mean of {size} steps" if size > 1 else ""
    length = f"{format_number(x[-1])} tokens in {len(step.metrics):,} steps"
    return Drawing(
        name=f"loss-{_identifier(step)}",
        title=f"{step.name}: training loss",
        about=f"From {y[0]:.4g} to {y[-1]:.4g} over {length}{mean}{_looks(looks_y)}.",
        figure=figure,
    )


def _looks(values: Sequence[float]) -> str:
    """Figures of held-out text in words; empty without any."""
    return f"; on held-out text from {values[0]:.4g} to {values[-1]:.4g}, lowest {min(values):.4g}" if values else ""


def _kind(step: RunStep) -> str:
    report = (step.record or {}).get("report", {})
    return str(report.get("loss", "layer_mse" if any(k.startswith("error_") for k in step.metrics[0]) else ""))


def _identifier(step: RunStep) -> str:
    return "".join(c if c.isalnum() else "-" for c in step.folder.name)
