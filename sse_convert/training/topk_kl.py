"""KL to a teacher of whom only the likeliest tokens are known, and the mass of all others together.

Shapes: T tokens, k tokens kept, V vocabulary. The loss is the KL between the k + 1 outcomes "kept token i" and "any
other token"; with k = V it is the whole KL. By the log-sum inequality it is never above it.
"""

import dataclasses as dc
from collections.abc import Mapping

import torch
from torch import Tensor

from sse_convert.errors import ShapeError
from sse_convert.modeling.head import Head
from sse_convert.modeling.logits import KL_BYTES
from sse_convert.training.losses import compute_dtype, summed

NAMES = ("teacher_index", "teacher_log_p", "teacher_log_rest")
"""keys under which a batch holds `Truncated`"""


class Truncated:
    """A teacher's predictions. No dataclass: data-parallel wrappers must pass it on untouched.

    Args:
        index: integers [..., k], the tokens kept.
        log_p: [..., k] their log probabilities.
        log_rest: [...] log of the mass of all other tokens; -inf for none.
    """

    def __init__(self, index: Tensor, log_p: Tensor, log_rest: Tensor) -> None:
        self.index, self.log_p, self.log_rest = index, log_p, log_rest

    @staticmethod
    def of(logits: Tensor, top_k: int) -> "Truncated":
        """The `top_k` likeliest tokens of logits [T, V]."""
        whole = logits.logsumexp(-1, keepdim=True)
        values, index = logits.topk(top_k, -1)
        rest = logits.scatter(-1, index, float("-inf")).logsumexp(-1, keepdim=True)
        return Truncated(index, values - whole, (rest - whole).squeeze(-1))

    @staticmethod
    def of_batch(batch: Mapping[str, Tensor]) -> "Truncated":
        """What a batch holds under `NAMES`."""
        return Truncated(*(batch[name] for name in NAMES))

    def at(self, kept: Tensor) -> "Truncated":
        """Those of the tokens where a mask [...] is true, in one row."""
        return Truncated(self.index[kept], self.log_p[kept], self.log_rest[kept])

    def flat(self, dtype: torch.dtype) -> "Truncated":
        """One row per token, index int64 and the rest in `dtype`, with masses that sum to 1 in spite of rounding."""
        log_p, log_rest = self.log_p.flatten(0, -2).to(dtype), self.log_rest.flatten().to(dtype)
        whole = torch.logaddexp(log_p.logsumexp(-1), log_rest)
        return Truncated(self.index.flatten(0, -2).long(), log_p - whole[:, None], log_rest - whole)


def linear_truncated_kl(hidden: Tensor, head: Head, teacher: Truncated) -> Tensor:
    """Summed KL(teacher || student) over the kept tokens and one bucket for all others, in nats, 0-d.

    Args:
        hidden: [T, D] the student's final hidden states.
        head: the student's head.
        teacher: of the same T tokens.

    Raises:
        ShapeError: hidden states, head and teacher disagree.
    """
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise ShapeError(
            f"hidden states have shape {tuple(hidden.shape)}", expected=f"(tokens, {head.weight.shape[1]})"
        )
    flat = teacher.flat(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    if flat.index.shape[0] != hidden.shape[0] or flat.index.shape[1] > head.weight.shape[0]:
        raise ShapeError(
            f"the teacher has {tuple(flat.index.shape)} (tokens, kept), the student {hidden.shape[0]} tokens",
            expected=f"the same tokens, at most {head.weight.shape[0]} kept",
        )
    return summed(hidden.to(compute_dtype(hidden)), head, _TruncatedDivergence(flat.index, flat.log_p, flat.log_rest))


@dc.dataclass(frozen=True, slots=True)
class _TruncatedDivergence:
    """Loss of a chunk of tokens, and the gradient of its logits: q - p where kept, q (1 - rest / q_rest) elsewhere."""

    index: Tensor
    log_p: Tensor
    log_rest: Tensor
    logit_bytes: int = KL_BYTES

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        logits = head.finished(x)
        index, log_p, log_rest = self.index[part], self.log_p[part], self.log_rest[part]
        log_q = torch.log_softmax(logits, -1)
        kept = log_q.gather(1, index)
        log_q_rest = log_q.scatter(1, index, float("-inf")).logsumexp(-1)
        p, rest = log_p.exp(), log_rest.exp()
        some = rest > 0
        excess = torch.where(some, log_rest - log_q_rest, 0)
        loss = (p * (log_p - kept)).sum() + (rest * excess).sum()
        factor = torch.where(some, -torch.expm1(excess), 1)
        grad = log_q.exp_().mul_(factor[:, None]).scatter_(1, index, kept.exp() - p)
        return loss, head.linear_grad(grad, logits)
