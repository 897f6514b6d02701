"""Whether a model predicts a text at all."""

import math

GUESSED = 0.95
"""share of the loss of equal chances from which a model counts as guessing"""


def guesses(loss: float, vocabulary: int) -> bool:
    """Whether a loss in nats is at least `GUESSED` of ln V, that of equal chances for V tokens, or no number."""
    return not loss < GUESSED * math.log(vocabulary)


def guess_warnings(loss: float, vocabulary: int) -> list[str]:
    """The warning of a teacher with this loss in nats on the training text, if it guesses."""
    if not guesses(loss, vocabulary):
        return []
    return [
        f"the teacher's loss on the training text is {loss:.2f} nats, no better than guessing one of "
        f"{vocabulary:,} tokens: check its weights, its tokenizer and the text"
    ]
