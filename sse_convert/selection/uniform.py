"""Every r-th layer, the last one of each stretch: the baseline, and how the paper lays out its hybrids."""

from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Meter


def uniform(meter: Meter, keep: int) -> Choice:
    """Layers (i + 1) * L / keep - 1, rounded down. Nothing is measured."""
    layers = len(meter.layers)
    return Choice(method="uniform", kept=tuple((i + 1) * layers // keep - 1 for i in range(keep)), scores={})
