"""How many logits exist at a time in losses and predictions that go through a batch in chunks. No torch."""

ON_CPU = 2**26
"""elements of the largest logits tensor on a CPU"""
KL_BYTES = 16
"""bytes that a KL takes per logit of a chunk, the most of all losses: log probabilities of student and teacher, one set
of probabilities, and the logits, in float32"""
SHARE = 16
"""a chunk's KL takes at most this part of a GPU's memory: few chunks, since each adds to the head's whole gradient"""


def logits_at_once(memory: int | None) -> int:
    """Elements of the largest logits tensor, a power of two.

    Args:
        memory: bytes of the whole GPU; None on a CPU.
    """
    return ON_CPU if memory is None else 1 << (max(1, memory // SHARE // KL_BYTES).bit_length() - 1)
