"""SSE over the delta rule with another library's function for what happens within partitions.

Slots are put in order by partition, sequence and position, those of the shared partition before them; each sequence in
each partition is one sequence of the library's. The write gate multiplies write strengths, the read gate outputs.

Shape letters: T tokens, N partitions, K = top_k, R = T * K slots, S sequences, H heads, D = V.
"""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.operator_inputs import Inputs
from benchmarks.kernels.operator_slots import Library, as_taken
from sse_convert.kernels.routing import Routing, route


@dc.dataclass(frozen=True)
class Order:
    """Where the slots of the partitions go, and come from."""

    there: Tensor
    """[R], of each slot in order its place among those of the first choices, of the second choices, ..."""
    back: Tensor
    """[R], the inverse"""
    ends: Tensor
    """where the segments that are not empty end"""


def run(x: Inputs, attend: Library) -> Tensor:
    """o [T, H, V]; one state for each query head, and an output and decays as the library has them."""
    assert x.case.query_heads == x.case.heads, "a library has a state for each query head"
    beta = x.leaves["write_strength"]
    q, k, v, log_decay = (as_taken(x, name) for name in ("q", "k", "v", "log_decay"))
    if x.case.partitions == 1 and not x.case.shared:
        return _attend(attend, [q, k, v, log_decay, beta], x.cu_seqlens)
    routing = route(x.leaves["router_logits"], x.case.top_k)
    gate_R = routing.gate_TN.gather(1, routing.used_TK).T.flatten()
    order, copies = _order(x, routing), x.case.top_k
    own = [tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for tensor in (q, k, v, log_decay, beta)]
    own[4] = own[4] * gate_R[:, None]
    slots = [_Permuted.apply(tensor, order.there, order.back) for tensor in own]  # type: ignore[no-untyped-call]
    cu_seqlens, shared = torch.cat([x.cu_seqlens[:1], order.ends]), 0
    if x.case.shared:
        of_shared = [*(as_taken(x, f"shared {name}") for name in ("q", "k")), v, as_taken(x, "shared log_decay"), beta]
        slots = [torch.cat(pair) for pair in zip(of_shared, slots, strict=True)]
        cu_seqlens, shared = torch.cat([x.cu_seqlens, order.ends + x.case.tokens]), x.case.tokens
    o_RHV = _attend(attend, slots, cu_seqlens)
    read = _Permuted.apply(o_RHV[shared:], order.back, order.there) * gate_R[:, None, None]  # type: ignore[no-untyped-call]
    o_THV = read.to(v.dtype).unflatten(0, (copies, -1)).sum(0)
    return o_THV + o_RHV[:shared] if x.case.shared else o_THV


def _attend(attend: Library, slots: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    q, k, v, log_decay, beta = (tensor[None] for tensor in slots)
    return attend(q, k, v, g=log_decay, beta=beta, cu_seqlens=cu_seqlens)[0][0]


def _order(x: Inputs, routing: Routing) -> Order:
    """Sorting is stable, and choices after each other: the places of a partition's tokens ascend."""
    S, N = len(x.case.lengths), x.case.partitions
    segment_KT = (routing.used_TK * S + x.sequences[:, None]).T
    slot_KT = torch.arange(segment_KT.numel(), device=segment_KT.device).view_as(segment_KT)
    by_token = (segment_KT * x.case.tokens + slot_KT % x.case.tokens).flatten()
    there = by_token.argsort()
    counts = torch.bincount(segment_KT.flatten(), minlength=S * N)
    return Order(there, torch.empty_like(there).scatter_(0, there, slot_KT.flatten()), counts[counts > 0].cumsum(0))


class _Permuted(torch.autograd.Function):
    """Rows in another order. Backward reads, where that of `index_select` adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
