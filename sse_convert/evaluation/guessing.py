"""Whether a model predicts a text at all."""

import math

GUESSED = 0.95
"""share of the loss of equal chances from which a model counts as guessing"""


def guesses(loss: float, vocabulary: int) -> bool:
    """Whether a loss in nats is at least `GUESSED` of ln V, that of equal chances for V tokens, or no number."""
    return not loss < GUESSED * math.log(vocabulary)
