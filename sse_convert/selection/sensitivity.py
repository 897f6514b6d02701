"""Replace one layer at a time: what does the loss of text and of recall lose?"""

from sse_convert.selection.choice import Choice, best
from sse_convert.selection.measure import Meter


def sensitivity(meter: Meter, keep: int) -> Choice:
    """Score: rise of text loss plus rise of recall loss, nats per token, when the layer alone is replaced."""
    teacher = meter.measure(meter.layers).loss(meter.recall_weight)
    scores = {i: one.loss(meter.recall_weight) - teacher for i, one in meter.without_each().items()}
    return best("sensitivity", scores, keep)
