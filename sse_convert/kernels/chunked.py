"""Chunk-parallel gated linear attention on packed segments, in plain torch: the engine of three backends.

Inside a chunk the decay between two tokens is built by doubling blocks, from one token to the whole chunk. Each block
carries three things: its queries decayed from the block's start, its keys decayed to the block's end, and its total
decay. Two neighbouring blocks meet in one matmul (queries of the right one, keys of the left one) and merge with one
multiplication each. Every factor is a product of decays, so it lies in [0, 1]: nothing overflows however strong the
decay, no logarithms are subtracted, and a token's result depends on nothing after it, to the last bit.

The backward is written out (and tested against autograd of the reference): it keeps the inputs and the states between
chunks, and runs the doubling again instead of keeping what every level made.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sse_convert.kernels.chunk_layout import ChunkLayout, Slab, chunk_layout

CHUNK_SIZE = 64
"""tokens per chunk, a power of two (benchmarks/kernels/torch_backends.py measures it)"""
SLAB_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""size of the queries worked on at a time, by device type: what the cache holds well, or what memory can spare"""


def gated_linear_attention(
    q_THGD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    log_decay_THD: Tensor,
    cu_seqlens: Tensor,
    state_SHDV: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t outer v_t;  o_t = q_t S_t, over packed segments.

    Differentiable once in every tensor but cu_seqlens. All tensors in one dtype, float32 or float64.

    Args:
        q_THGD: queries, already scaled.
        k_THD: keys.
        v_THV: values.
        log_decay_THD: natural log, <= 0.
        cu_seqlens: [S + 1] int64 offsets of the segments, any device (one device sync if not on the CPU).
        state_SHDV: states before each segment.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        o [T, H, G, V] and the states after each segment [S, H, D, V]; an empty segment returns its state unchanged.
    """
    rows = SLAB_BYTES.get(q_THGD.device.type, SLAB_BYTES["cuda"]) // (q_THGD[0, 0].numel() * q_THGD.element_size())
    layout = chunk_layout(cu_seqlens, k_THD.shape[1], chunk_size, rows, q_THGD.device)
    inputs = (q_THGD, k_THD, v_THV, log_decay_THD, state_SHDV)
    o_THGV, final_SHDV = _GatedLinearAttention.apply(*inputs, layout)  # type: ignore[no-untyped-call]
    return o_THGV, final_SHDV


class _GatedLinearAttention(torch.autograd.Function):
    """Works through the slabs in order, the backward in reverse, carrying the states of the segments."""

    @staticmethod
    def forward(
        ctx: Any, q_THGD: Tensor, k_THD: Tensor, v_THV: Tensor, log_decay_THD: Tensor, state_SHDV: Tensor,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (T, H, G, _), V = q_THGD.shape, v_THV.shape[2]
        out = v_THV.new_empty(T * H + 1, G, V)
        state = state_SHDV.index_select(0, layout.segment_order)
        befores = []
        for slab in layout.slabs:
            q_EXD, k_ECD, v_ECV = slab.take(q_THGD).flatten(1, 2), slab.take(k_THD), slab.take(v_THV)
            tree = _decay_tree(slab.take(log_decay_THD).exp_())
            scores_EXC = _within_chunks(q_EXD, k_ECD, tree)
            before_EDV = _scan(state, torch.bmm(k_ECD.mT, v_ECV), tree[-1], slab)
            slab.put(out, _grouped(torch.bmm(scores_EXC, v_ECV).baddbmm_(q_EXD, before_EDV), G))
            befores.append(before_EDV)
        ctx.save_for_backward(q_THGD, k_THD, v_THV, log_decay_THD, *befores)
        ctx.layout = layout
        return out[:-1].view(T, H, G, V), torch.empty_like(state).index_copy_(0, layout.segment_order, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_THGV: Tensor, d_final_SHDV: Tensor) -> tuple[Tensor | None, ...]:
        layout: ChunkLayout = ctx.layout
        q_THGD, k_THD, v_THV, log_decay_THD, *befores = ctx.saved_tensors
        inputs = (q_THGD, k_THD, v_THV, log_decay_THD)
        gradients = [x.new_empty(x.shape[0] * x.shape[1] + 1, *x.shape[2:]) for x in inputs]
        d_state = d_final_SHDV.index_select(0, layout.segment_order)
        for slab, before_EDV in zip(reversed(layout.slabs), reversed(befores), strict=True):
            parts = _slab_backward(slab, d_state, before_EDV, *(slab.take(x) for x in (*inputs, d_out_THGV)))
            for whole, part in zip(gradients, parts, strict=True):
                slab.put(whole, part)
        d_state_SHDV = torch.empty_like(d_state).index_copy_(0, layout.segment_order, d_state)
        return *(g[:-1].view(x.shape) for g, x in zip(gradients, inputs, strict=True)), d_state_SHDV, None


def _slab_backward(
    slab: Slab,
    d_state: Tensor,
    before_EDV: Tensor,
    q_ECGD: Tensor,
    k_ECD: Tensor,
    v_ECV: Tensor,
    log_decay_ECD: Tensor,
    d_out_ECGV: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_decay; d_state becomes the gradient of the states before the slab.

    With b the running sum of log_decay, q enters only as q exp(b) and k as k exp(-b), up to the chunk's total decay. So
    the gradient of b is q dq - k dk, and that of log_decay sums it over the later tokens of the chunk.
    """
    q_EXD, d_out_EXV, G = q_ECGD.flatten(1, 2), d_out_ECGV.flatten(1, 2), q_ECGD.shape[2]
    tree = _decay_tree(log_decay_ECD.exp())
    from_start_ECD, to_end_ECD = tree[0].clone(), torch.ones_like(tree[0])
    d_scores_EXC = torch.bmm(d_out_EXV, v_ECV.mT)
    scores_EXC, d_q_EXD, d_k_ECD = _within_chunks_backward(q_EXD, k_ECD, tree, from_start_ECD, to_end_ECD, d_scores_EXC)
    d_q_ECGD, from_start_EC1D = _grouped(d_q_EXD, G), from_start_ECD[:, :, None]
    q_start_EXD = (q_ECGD * from_start_EC1D).flatten(1, 2)
    k_end_ECD = k_ECD * to_end_ECD
    d_after_EDV = _scan_backward(d_state, torch.bmm(q_start_EXD.mT, d_out_EXV), tree[-1], slab)

    d_v_ECV = torch.bmm(scores_EXC.mT, d_out_EXV).baddbmm_(k_end_ECD, d_after_EDV)
    d_q_ECGD.addcmul_(_grouped(torch.bmm(d_out_EXV, before_EDV.mT), G), from_start_EC1D)
    d_k_end_ECD = torch.bmm(v_ECV, d_after_EDV.mT)
    d_k_ECD.addcmul_(d_k_end_ECD, to_end_ECD)

    d_total_E1D = (d_after_EDV * before_EDV).sum(-1)[:, None] * tree[-1]
    d_total_E1D += (k_end_ECD * d_k_end_ECD).sum(1, keepdim=True)
    d_b_ECD = (q_ECGD * d_q_ECGD).sum(2).addcmul_(k_ECD, d_k_ECD, value=-1)
    later_CC = torch.ones(2 * k_ECD.shape[1:2], dtype=k_ECD.dtype, device=k_ECD.device).triu_()
    return d_q_ECGD, d_k_ECD, d_v_ECV, torch.matmul(later_CC, d_b_ECD).add_(d_total_E1D)


def _grouped(x_EXD: Tensor, G: int) -> Tensor:
    """View [E, C, G, D] of rows."""
    return x_EXD.view(x_EXD.shape[0], x_EXD.shape[1] // G, G, x_EXD.shape[2])


def _decay_tree(decay_ECD: Tensor) -> list[Tensor]:
    """Total decay of every block of 1, 2, 4 ... C tokens: [E, C / size, D] each."""
    tree = [decay_ECD]
    while tree[-1].shape[1] > 1:
        tree.append(tree[-1][:, 0::2] * tree[-1][:, 1::2])
    return tree


def _levels(tree: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pairs of neighbouring blocks: their size, and the decays [E, pairs, 1, D] of the left and of the right one."""
    for i, decay in enumerate(tree[:-1]):
        yield 2**i, decay[:, 0::2, None], decay[:, 1::2, None]


def _halves(x_EXD: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Views [E, pairs, rows, D] of the left and of the right block of each pair."""
    E, X, D = x_EXD.shape
    left, right = x_EXD.view(E, pairs, 2, X // (2 * pairs), D).unbind(2)
    return left, right


def _across(scores_EXC: Tensor, half: int) -> Tensor:
    """View [E, pairs, rows of the right block, half] of what right blocks read from left blocks."""
    E, X, C = scores_EXC.shape
    pairs = C // (2 * half)
    blocks = scores_EXC.view(E, pairs, 2, X // (2 * pairs), pairs, 2, half)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _own(scores_EXC: Tensor) -> Tensor:
    """View [E, C, G] of what tokens read from themselves."""
    E, X, C = scores_EXC.shape
    return scores_EXC.view(E, C, X // C, C).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _within_chunks(q_EXD: Tensor, k_ECD: Tensor, tree: list[Tensor]) -> Tensor:
    """Scores [E, X, C]; then q has become q decayed from the chunk's start, and k has become k decayed to its end."""
    E, C, _ = k_ECD.shape
    q_ECGD = _grouped(q_EXD, q_EXD.shape[1] // C)
    scores_EXC = q_EXD.new_zeros(E, q_EXD.shape[1], C)
    _own(scores_EXC).copy_((q_ECGD * k_ECD[:, :, None]).sum(-1))
    q_ECGD *= tree[0][:, :, None]
    for half, decay_left, decay_right in _levels(tree):
        _, q_right = _halves(q_EXD, C // (2 * half))
        k_left, _ = _halves(k_ECD, C // (2 * half))
        _across(scores_EXC, half).copy_(q_right @ k_left.mT)
        q_right *= decay_left
        k_left *= decay_right
    return scores_EXC


def _within_chunks_backward(
    q_EXD: Tensor, k_ECD: Tensor, tree: list[Tensor], from_start_ECD: Tensor, to_end_ECD: Tensor, d_scores_EXC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores again [E, X, C], and the gradients they send to q [E, X, D] and k [E, C, D].

    from_start comes as the decay of each token and leaves as the decay since before the chunk; to_end comes as ones and
    leaves as the decay until the chunk's end.
    """
    C, G = k_ECD.shape[1], q_EXD.shape[1] // k_ECD.shape[1]
    scores_EXC, own_ECG1 = torch.zeros_like(d_scores_EXC), _own(d_scores_EXC)[..., None]
    _own(scores_EXC).copy_((_grouped(q_EXD, G) * k_ECD[:, :, None]).sum(-1))
    d_q_EXD = (own_ECG1 * k_ECD[:, :, None]).view_as(q_EXD)
    d_k_ECD = (own_ECG1 * _grouped(q_EXD, G)).sum(2)
    for half, decay_left, decay_right in _levels(tree):
        pairs = C // (2 * half)
        by_token = (*d_q_EXD.shape[:1], pairs, half, G, d_q_EXD.shape[2])
        _, start_right = _halves(from_start_ECD, pairs)
        end_left, _ = _halves(to_end_ECD, pairs)
        q_right = (_halves(q_EXD, pairs)[1].view(by_token) * start_right[..., None, :]).flatten(2, 3)
        k_left = _halves(k_ECD, pairs)[0] * end_left
        _across(scores_EXC, half).copy_(q_right @ k_left.mT)
        d_across = _across(d_scores_EXC, half).contiguous()
        d_q_right = (d_across @ k_left).view(by_token)
        _halves(d_q_EXD, pairs)[1].view(by_token).addcmul_(d_q_right, start_right[..., None, :])
        _halves(d_k_ECD, pairs)[0].addcmul_(d_across.mT @ q_right, end_left)
        start_right *= decay_left
        end_left *= decay_right
    return scores_EXC, d_q_EXD, d_k_ECD


def _scan(state_SHDV: Tensor, update_EDV: Tensor, decay_E1D: Tensor, slab: Slab) -> Tensor:
    """State before each chunk [E, D, V]; the states, in segment order, are advanced in place."""
    before_EDV = torch.empty_like(update_EDV)
    for before, update, decay in slab.steps(before_EDV, update_EDV, decay_E1D.mT):
        before.copy_(state_SHDV[: len(before)])
        torch.addcmul(update, decay, before, out=state_SHDV[: len(before)])
    return before_EDV


def _scan_backward(d_state_SHDV: Tensor, d_before_EDV: Tensor, decay_E1D: Tensor, slab: Slab) -> Tensor:
    """Gradient of the state after each chunk [E, D, V]; that of the states is taken back in place."""
    d_after_EDV = torch.empty_like(d_before_EDV)
    for d_after, d_before, decay in reversed(slab.steps(d_after_EDV, d_before_EDV, decay_E1D.mT)):
        d_after.copy_(d_state_SHDV[: len(d_after)])
        torch.addcmul(d_before, decay, d_after, out=d_state_SHDV[: len(d_after)])
    return d_after_EDV
