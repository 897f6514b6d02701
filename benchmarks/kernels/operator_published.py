"""SSE as its authors published it: general tensor operations around a general gated linear attention.

Our own few lines for their algorithm (paper, Algorithms 1 and 2; BICLab/SpikingBrain2.0 `spb2/sse.py`), GLA mode, with
their order of operations, their copies and their host syncs, and without the auxiliary loss. `attend` is the gated
linear attention: fla-core on a GPU, anything that computes the same in a test. What they cache by `cu_seqlens`
(sequence and position of each token) is in the inputs here.

Shape letters: T tokens, N partitions, K = top_k, R = T * K slots, S sequences, H heads, D = V.
"""

import dataclasses as dc
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.operator_inputs import Inputs

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(q, k, v, log_decay, cu_seqlens, initial state) -> (o, final state); [R, H, D] and [segments, H, D, V]"""


@dc.dataclass(frozen=True)
class Sorted:
    """The shared partition's tokens, then slots by (sequence, partition, position)."""

    q_RHD: Tensor
    k_RHD: Tensor
    v_RHV: Tensor
    log_decay_RHD: Tensor
    cu_slots: Tensor
    """offsets of the segments that are not empty"""
    token_R: Tensor
    """of the slots after the shared ones"""
    counts_SN: Tensor
    """slots of each sequence and partition"""


def _selected(x: Inputs) -> tuple[Tensor, Tensor]:
    """Gate values [T, K], rounded as they do, and partitions [T, K]."""
    gate_TN = x.leaves["router_logits"].softmax(-1, dtype=torch.float32)
    value_TK, partition_TK = gate_TN.topk(x.case.top_k, dim=-1)
    return value_TK.to(x.leaves["q"].dtype), partition_TK


def _sorted(x: Inputs) -> Sorted:
    t, (S, N, K) = x.leaves, (len(x.case.lengths), x.case.partitions, x.case.top_k)
    value_TK, partition_TK = _selected(x)
    value_R, partition_R = value_TK.flatten(), partition_TK.flatten()
    by_token = (x.sequences, x.positions, torch.arange(x.case.tokens, device=value_R.device))
    sequence_R, position_R, token_R = (i[:, None].expand(-1, K).reshape(-1) for i in by_token)
    position_bits = int(x.lengths.max().item()).bit_length()
    sequence_shift = position_bits + (N - 1).bit_length()
    order_R = ((sequence_R << sequence_shift) | (partition_R << position_bits) | position_R).argsort()
    partition_R, sequence_R, token_R, value_R = (i.take(order_R) for i in (partition_R, sequence_R, token_R, value_R))

    row_RHD = token_R[:, None, None].expand(-1, *t["q"].shape[1:])
    q, k, v, log_decay = (torch.gather(t[name], 0, row_RHD) for name in ("q", "k", "v", "log_decay"))
    q, k = q * value_R[:, None, None], k * value_R[:, None, None]
    counts = torch.bincount(sequence_R * N + partition_R, minlength=S * N)
    offsets = torch.zeros(1 + S * N, dtype=torch.long, device=counts.device)
    offsets[1:] = counts.cumsum(0)
    offsets = torch.unique(offsets)
    q, k, log_decay = (torch.cat([t[f"shared {n}"], s]) for n, s in (("q", q), ("k", k), ("log_decay", log_decay)))
    cu_slots = torch.cat([x.cu_seqlens, offsets[1:] + x.cu_seqlens[-1]])
    return Sorted(q, k, torch.cat([t["v"], v]), log_decay, cu_slots, token_R, counts.view(S, N))


def _combined(o_RHV: Tensor, x: Inputs, token_R: Tensor) -> Tensor:
    shared, sparse = o_RHV[: x.cu_seqlens[-1]], o_RHV[x.cu_seqlens[-1] :]
    return shared + torch.zeros_like(shared).index_add_(0, token_R, sparse)


def varlen(x: Inputs, attend: Attend) -> Tensor:
    """Algorithm 2: slots sorted by partition, one call over all segments. Returns o [T, H, V]."""
    s = _sorted(x)
    o, _ = attend(s.q_RHD, s.k_RHD, s.v_RHV, s.log_decay_RHD, s.cu_slots, None)
    return _combined(o, x, s.token_R)


def varlen_step(x: Inputs, state: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """The same with states [S + S * N, H, D, V], shared ones first, of which the used ones travel; returns new ones."""
    S = len(x.case.lengths)
    s = _sorted(x)
    used = s.counts_SN.flatten().nonzero()[:, 0].cpu()
    initial = torch.cat([state[:S], state[S:][used]])
    o, final = attend(s.q_RHD, s.k_RHD, s.v_RHV, s.log_decay_RHD, s.cu_slots, initial)
    assert final is not None
    sparse = state[S:]
    sparse[used] = final[S:]
    return _combined(o, x, s.token_R), torch.cat([final[:S], sparse])


def mask(x: Inputs, attend: Attend) -> Tensor:
    """Algorithm 1: a copy of every token for every partition, masked; partitions and the shared one side by side."""
    t, N = x.leaves, x.case.partitions
    value_TK, partition_TK = _selected(x)
    gate_TN = value_TK.new_zeros(x.case.tokens, N).scatter(1, partition_TK, value_TK)
    gate_TN11 = gate_TN[..., None, None]
    mask_TN11 = (gate_TN11 != 0).to(value_TK.dtype)
    weights = {"q": gate_TN11, "k": gate_TN11, "v": mask_TN11, "log_decay": mask_TN11.float()}
    copies = {name: (t[name][:, None] * weight).flatten(1, 2) for name, weight in weights.items()}
    shared = {"q": t["shared q"], "k": t["shared k"], "v": t["v"], "log_decay": t["shared log_decay"]}
    q, k, v, log_decay = (torch.cat([shared[name], copies[name]], 1) for name in weights)
    o, _ = attend(q, k, v, log_decay, x.cu_seqlens, None)
    return o.unflatten(1, (N + 1, -1)).sum(1)
