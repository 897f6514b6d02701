"""Keep the layer that helps most given those kept already, until there are enough.

Source: the greedy replacement of arXiv:2601.11667, run from the other end: it converts the least harmful layer, round
by round, which takes more rounds when few layers stay.
"""

from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Meter


def greedy(meter: Meter, keep: int, _tries: int = 0) -> Choice:
    """Score: KL to the teacher that keeping the layer saved in the last round that tried it, text plus recall.

    A layer chosen in an early round ranks above all that were chosen later or never: rounds add the largest KL.
    """
    kept: tuple[int, ...] = ()
    scores: dict[int, float] = {}
    whole = meter.measure(()).kl(meter.recall_weight)
    for round_ in range(keep):
        before = meter.measure(kept).kl(meter.recall_weight)
        left = [i for i in meter.layers if i not in kept]
        found = meter.measure_all(((*kept, i) for i in left), beside=kept)
        saved = {i: before - one.kl(meter.recall_weight) for i, one in zip(left, found, strict=True)}
        chosen = max(saved, key=lambda i: (saved[i], -i))
        scores |= saved
        scores[chosen] += (keep - round_) * whole
        kept = (*kept, chosen)
    return Choice(method="greedy", kept=tuple(sorted(kept)), scores=scores)
