"""Which partitions a token writes to and reads from, and with which weight e, the softmax of the router logits.

Nothing else selects, so all backends break ties alike.
"""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.errors import UsageError


@dc.dataclass(frozen=True, slots=True)
class Routing:
    """The gate of every token over all partitions, and the partitions it uses, best first."""

    gate_TN: Tensor
    """e, float32 or float64"""
    used_TK: Tensor
    """int64, partitions a token decays, writes and reads"""

    @property
    def num_partitions(self) -> int:
        """N."""
        return self.gate_TN.shape[1]


def route(router_logits: Tensor, top_k: int) -> Routing:
    """Rank the partitions of every token by e; equal ranks go to the lowest index.

    Args:
        router_logits: [T, N], any float dtype.
        top_k: partitions used, 1 to N.

    Returns:
        The routing; gradients flow through `gate_TN` only.

    Raises:
        UsageError: top_k is out of range.

    Source: arXiv:2507.16577, equations eta_proj and sparse_index.
    """
    N = router_logits.shape[1]
    if not 1 <= top_k <= N:
        raise UsageError(f"top_k is {top_k}", expected=f"1 to the number of partitions ({N})")
    logits_TN = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    gate_TN = torch.softmax(logits_TN, dim=-1)
    return Routing(gate_TN, _ranked(gate_TN.detach())[1][:, :top_k])


def best_partitions(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """e and the index (int64), each [T, top_k], of the partitions that `route` lets tokens use, best first; without
    gradients. For arguments see there."""
    logits_TN = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    gate_TN, order_TN = _ranked(torch.softmax(logits_TN, dim=-1))
    return gate_TN[:, :top_k], order_TN[:, :top_k]


def _ranked(score_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, best first, and which partitions have them."""
    values, indices = torch.sort(score_TN, dim=-1, descending=True, stable=True)
    return values, indices


def load(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """Share of tokens that write to each partition.

    Args:
        routing: of T tokens.
        mask: bool [T], True for the tokens that count; None counts all.

    Returns:
        [N] in the gate's dtype, without gradient; sums to top_k (to 0 when no token counts).
    """
    ones_TK = torch.ones_like(routing.used_TK, dtype=routing.gate_TN.dtype)
    if mask is not None:
        ones_TK = ones_TK * mask[:, None]
    written_TN = torch.zeros_like(routing.gate_TN, requires_grad=False).scatter(1, routing.used_TK, ones_TK)
    return written_TN.sum(0) / _token_count(routing, mask)


def balance_loss(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """(N/k) * sum_i f_i p_i: 1.0 when all partitions are used alike, up to N/k when one takes everything.

    f_i is the share of tokens that write to i (no gradient), p_i the mean of e^i (gradient).

    Args:
        routing: of T tokens.
        mask: bool [T], True for the tokens that count; None counts all.

    Returns:
        0-d tensor; 0 when no token counts.

    Source: arXiv:2507.16577, auxiliary loss; the coefficient is the caller's.
    """
    gate_TN = routing.gate_TN if mask is None else routing.gate_TN * mask[:, None]
    mean_gate_N = gate_TN.sum(0) / _token_count(routing, mask)
    return routing.num_partitions / routing.used_TK.shape[1] * (load(routing, mask) * mean_gate_N).sum()


def _token_count(routing: Routing, mask: Tensor | None) -> Tensor | int:
    if mask is None:
        return max(routing.gate_TN.shape[0], 1)
    return mask.sum().clamp_min(1)
