"""How many logits exist at a time in losses and predictions that go through a batch in chunks. No torch."""

ON_CPU = 2**26
"""elements of the largest logits tensor on a CPU"""
KL_BYTES = 16
"""bytes that a KL takes per logit of a chunk, the most of all losses: log probabilities of student and teacher, one set
of probabilities, and the logits, in float32"""
CE_BYTES = 12
"""the same of a cross entropy"""
FUSED_BYTES = 8
"""the same of a loss in one kernel: logits of student and teacher in float32; in bfloat16 it takes half of that"""
SHARE = 16
"""a chunk takes at most this part of a GPU's memory: few chunks, since each adds to the head's whole gradient"""


def logits_at_once(memory: int | None, logit_bytes: int = KL_BYTES) -> int:
    """Elements of the largest logits tensor, a power of two.

    Args:
        memory: bytes of the whole GPU; None on a CPU.
        logit_bytes: that each of them costs.
    """
    return ON_CPU if memory is None else 1 << (max(1, memory // SHARE // logit_bytes).bit_length() - 1)
