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
    """e, float32 or float64, not renormalised over the selected partitions"""
    write_TK: Tensor
    """int64, partitions a token decays and writes"""
    read_TK: Tensor
    """int64, partitions a token reads; write_TK and read_TK are prefixes of one ranking, so one contains the other"""

    def used(self) -> Tensor:
        """int64 [T, K], partitions a token writes or reads."""
        return self.write_TK if self.write_TK.shape[1] >= self.read_TK.shape[1] else self.read_TK

    @property
    def num_partitions(self) -> int:
        """N."""
        return self.gate_TN.shape[1]


def route(
    router_logits: Tensor,
    top_k: int,
    read_top_k: int | None = None,
    router_bias: Tensor | None = None,
) -> Routing:
    """Rank the partitions of every token by e (+ router_bias); equal ranks go to the lowest index.

    Args:
        router_logits: [T, N], any float dtype.
        top_k: partitions written, 1 to N.
        read_top_k: partitions read, 1 to N; None for top_k.
        router_bias: [N] added to e for the ranking only; the gate stays e.

    Returns:
        The routing; gradients flow through `gate_TN` only.

    Raises:
        UsageError: top_k or read_top_k is out of range.

    Source: arXiv:2507.16577, equations eta_proj and sparse_index.
    """
    N = router_logits.shape[1]
    read_top_k = top_k if read_top_k is None else read_top_k
    for name, value in (("top_k", top_k), ("read_top_k", read_top_k)):
        if not 1 <= value <= N:
            raise UsageError(f"{name} is {value}", expected=f"1 to the number of partitions ({N})")
    logits_TN = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    gate_TN = torch.softmax(logits_TN, dim=-1)
    score_TN = gate_TN.detach() if router_bias is None else gate_TN.detach() + router_bias.detach().to(gate_TN.dtype)
    order_TN = _ranked(score_TN)[1]
    return Routing(gate_TN, order_TN[:, :top_k], order_TN[:, :read_top_k])


def best_partitions(router_logits: Tensor, top_k: int, router_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e and the index (int64), each [T, top_k], of the partitions that `route` lets tokens write, best
    first; without gradients. For arguments see there."""
    logits_TN = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    gate_TN = torch.softmax(logits_TN, dim=-1)
    if router_bias is None:
        gate_TN, order_TN = _ranked(gate_TN)
        return gate_TN[:, :top_k], order_TN[:, :top_k]
    order_TK = _ranked(gate_TN + router_bias.to(gate_TN.dtype))[1][:, :top_k]
    return gate_TN.gather(1, order_TK), order_TK


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
    ones_TK = torch.ones_like(routing.write_TK, dtype=routing.gate_TN.dtype)
    if mask is not None:
        ones_TK = ones_TK * mask[:, None]
    written_TN = torch.zeros_like(routing.gate_TN, requires_grad=False).scatter(1, routing.write_TK, ones_TK)
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
    return routing.num_partitions / routing.write_TK.shape[1] * (load(routing, mask) * mean_gate_N).sum()


def balanced_bias(router_bias: Tensor, load_N: Tensor, step: float) -> Tensor:
    """The selection bias after one balancing step: + step for partitions used less than the mean, - step for more.

    Args:
        router_bias: [N].
        load_N: [N], from `load`.
        step: size of the move, in units of e.

    Returns:
        The new [N] bias, in the dtype of the old one, without gradient.

    Source: the sign rule of auxiliary-loss-free balancing, arXiv:2408.15664.
    """
    load_N = load_N.detach()
    return router_bias.detach() + step * torch.sign(load_N.mean() - load_N).to(router_bias.dtype)


def _token_count(routing: Routing, mask: Tensor | None) -> Tensor | int:
    if mask is None:
        return max(routing.gate_TN.shape[0], 1)
    return mask.sum().clamp_min(1)
