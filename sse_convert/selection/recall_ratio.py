"""Replace one layer at a time: how much recall is lost for each point of ordinary prediction?

Source: HALO (arXiv:2601.22156), with needles (or copies) for its recall tasks and text for its common-sense tasks.
"""

import math

from sse_convert.selection.choice import Choice, best
from sse_convert.selection.measure import Meter

CAP = 50.0
FLOOR = 0.1
"""per cent, added to the denominator. HALO adds 1e-6, which lets the layer with the best prediction win on noise"""


def recall_ratio(meter: Meter, keep: int) -> Choice:
    """Score: (max R - R_l) / (max C - C_l + FLOOR), at most CAP, with layer l alone replaced.

    R and C are the mean probabilities (geometric, per cent) of the tokens to be recalled and of running text. A
    weight of recall would scale all scores alike, so the meter's is not read; where it is 0 the method is not used.
    """
    found = meter.without_each()
    recall = {i: 100 * math.exp(-m.recall_loss) for i, m in found.items()}
    text = {i: 100 * math.exp(-m.text_loss) for i, m in found.items()}
    most_recall, most_text = max(recall.values()), max(text.values())
    scores = {i: min(CAP, (most_recall - recall[i]) / (most_text - text[i] + FLOOR)) for i in meter.layers}
    return best("recall-ratio", scores, keep)
