"""Replace all layers, then restore one at a time: which brings the model closest to its teacher?

Source: GA-S2 of arXiv:2512.20569, which trains the replaced layers; here they are what stands in, untrained.
"""

from sse_convert.selection.choice import Choice, best
from sse_convert.selection.measure import Meter


def kl_restore(meter: Meter, keep: int) -> Choice:
    """Score: KL to the teacher with every layer replaced minus that with this layer kept, text plus recall."""
    nothing = meter.measure(()).kl(meter.recall_weight)
    found = meter.measure_all(((i,) for i in meter.layers), beside=())
    scores = {i: nothing - one.kl(meter.recall_weight) for i, one in zip(meter.layers, found, strict=True)}
    return best("kl-restore", scores, keep)
