"""Every r-th layer, the last one of each stretch: the baseline, and how the paper lays out its hybrids."""

from sse_convert.recipe.choosing import evenly
from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Meter


def uniform(meter: Meter, keep: int) -> Choice:
    """Of L layers those at (i + 1) * L / keep - 1, rounded down. Nothing is measured."""
    return Choice(method="uniform", kept=evenly(meter.layers, keep), scores={})
