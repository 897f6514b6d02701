"""Chunk-parallel gated linear attention on packed segments, in plain torch: the engine of three backends.

Chunks are worked through in slabs of consecutive steps of the state scan. Inside a chunk attention is a masked matmul
(`chunk_intra.py`); between chunks the state carries what came before. The backward is written out (and tested against
autograd of the reference): it keeps the inputs and the states between chunks, and makes the rest again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sse_convert.kernels.torch.chunk_intra import (
    Gradients,
    decay_tree,
    grouped,
    scaled,
    within_chunks,
    within_chunks_backward,
)
from sse_convert.kernels.torch.chunk_layout import ChunkLayout, Slab, chunk_layout
from sse_convert.kernels.torch.delta_rule import delta_rule, delta_rule_backward
from sse_convert.kernels.torch_modes import operator_name

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
    write_strength_TH: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t outer v_t;  o_t = q_t S_t, over packed segments.

    With write strengths the gated delta rule, in which write_strength_t (v_t - k_t diag(exp(log_decay_t)) S_{t-1})
    takes the place of v_t (`delta_rule.py`). Differentiable once in every tensor but cu_seqlens. All tensors in one
    dtype, float32 or float64.

    Args:
        q_THGD: queries, already scaled.
        k_THD: keys.
        v_THV: values.
        log_decay_THD: natural log, <= 0.
        cu_seqlens: [S + 1] int64 offsets of the segments, any device (one device sync if not on the CPU).
        state_SHDV: states before each segment.
        write_strength_TH: 0 to 1, for keys of norm 1 or less; None for gated linear attention.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        o [T, H, G, V] and the states after each segment [S, H, D, V]; an empty segment returns its state unchanged.
    """
    assert chunk_size.bit_count() == 1, f"chunk_size is {chunk_size}, a power of two is needed"
    tokens = [q_THGD, k_THD, v_THV, log_decay_THD]
    if torch.compiler.is_compiling():
        o_THGV, final_SHDV = _opaque(*tokens, write_strength_TH, state_SHDV, cu_seqlens, chunk_size)
        return o_THGV, final_SHDV
    tokens += [] if write_strength_TH is None else [write_strength_TH]
    layout = _layout(q_THGD, cu_seqlens, chunk_size)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, state_SHDV)):
        o_THGV, final_SHDV = _GatedLinearAttention.apply(layout, state_SHDV, *tokens)  # type: ignore[no-untyped-call]
    else:
        o_THGV, final_SHDV = _forward(tokens, state_SHDV, layout, befores=None)
    return o_THGV, final_SHDV


def _layout(q_THGD: Tensor, cu_seqlens: Tensor, chunk_size: int) -> ChunkLayout:
    (_, H, G, D), device = q_THGD.shape, q_THGD.device
    rows_per_slab = SLAB_BYTES.get(device.type, SLAB_BYTES["cuda"]) // (G * D * q_THGD.element_size())
    return chunk_layout(cu_seqlens, H, chunk_size, rows_per_slab, device)


def _forward(
    tokens: Sequence[Tensor], state_SHDV: Tensor, layout: ChunkLayout, befores: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Works through the slabs in order, carrying the states; appends the state before each chunk to `befores`.

    Args:
        tokens: q, k, v, log_decay, and write strengths for the delta rule.
        state_SHDV: states before each segment.
        layout: of the chunks.
        befores: what the backward needs; None for nothing.
    """
    (T, H, G, _), V = tokens[0].shape, tokens[2].shape[2]
    out = tokens[2].new_empty(T * H + 1, G, V)
    state = state_SHDV.index_select(0, layout.segment_order)
    slab_forward = _slab_forward if len(tokens) == 4 else delta_rule
    for slab in layout.slabs:
        out_ECGV, before_EDV = slab_forward(slab, state, *(slab.take(x) for x in tokens))
        slab.put(out, out_ECGV)
        if befores is not None:
            befores.append(before_EDV)
    return out[:-1].view(T, H, G, V), torch.empty_like(state).index_copy_(0, layout.segment_order, state)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, state_SHDV: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        befores: list[Tensor] = []
        results = _forward(tokens, state_SHDV, layout, befores)
        ctx.save_for_backward(*tokens, *befores)
        ctx.layout, ctx.count = layout, len(tokens)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_THGV: Tensor, d_final_SHDV: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: under checkpointing a second look would compute them again
        tokens, befores = saved[: ctx.count], saved[ctx.count :]
        with torch.autocast(d_out_THGV.device.type, enabled=False):  # some loops call backward inside autocast
            return None, *_backward(tokens, befores, ctx.layout, d_out_THGV, d_final_SHDV)


@torch.library.custom_op(operator_name(__name__, "gated_linear_attention"), mutates_args=())
def _opaque(
    q_THGD: Tensor, k_THD: Tensor, v_THV: Tensor, log_decay_THD: Tensor, write_strength_TH: Tensor | None,
    state_SHDV: Tensor, cu_seqlens: Tensor, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The whole of it as one node of a compiled graph, whose loops depend on the offsets' values."""
    tokens = _given(q_THGD, k_THD, v_THV, log_decay_THD, write_strength_TH)
    return _forward(tokens, state_SHDV, _layout(q_THGD, cu_seqlens, chunk_size), befores=None)


@torch.library.custom_op(operator_name(__name__, "gated_linear_attention_backward"), mutates_args=())
def _opaque_backward(
    q_THGD: Tensor, k_THD: Tensor, v_THV: Tensor, log_decay_THD: Tensor, write_strength_TH: Tensor | None,
    state_SHDV: Tensor, cu_seqlens: Tensor, d_out_THGV: Tensor, d_final_SHDV: Tensor, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    layout, befores = _layout(q_THGD, cu_seqlens, chunk_size), list[Tensor]()
    tokens = _given(q_THGD, k_THD, v_THV, log_decay_THD, write_strength_TH)
    _forward(tokens, state_SHDV, layout, befores)
    return _backward(tokens, befores, layout, d_out_THGV, d_final_SHDV)


@_opaque.register_fake
def _(q_THGD: Tensor, k_THD: Tensor, v_THV: Tensor, log_decay: Tensor, strength: Any, state: Tensor, *rest: Any) -> Any:
    return v_THV.new_empty(*q_THGD.shape[:3], v_THV.shape[2]), torch.empty_like(state)


@_opaque_backward.register_fake
def _(*inputs: Any) -> Any:
    state, tokens = inputs[5], _given(*inputs[:5])
    return [x.new_empty(x.shape) for x in (state, *tokens)]


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.chunk_size = inputs[7]


def _backward_of_opaque(ctx: Any, d_out_THGV: Tensor, d_final_SHDV: Tensor) -> tuple[Tensor | None, ...]:
    d_state, *d_tokens = _opaque_backward(*ctx.saved_tensors, d_out_THGV, d_final_SHDV, ctx.chunk_size)
    d_strength = d_tokens.pop() if len(d_tokens) == 5 else None
    return *d_tokens, d_strength, d_state, None, None


_opaque.register_autograd(_backward_of_opaque, setup_context=_keep)


def _backward(
    tokens: Sequence[Tensor], befores: Sequence[Tensor], layout: ChunkLayout, d_out_THGV: Tensor, d_final_SHDV: Tensor
) -> list[Tensor]:
    """Gradients of the states and of each of the tokens' tensors, from the states before each chunk, slab by slab from
    the end.
    """
    gradients = [x.new_empty(x.shape[0] * x.shape[1] + 1, *x.shape[2:]) for x in tokens]
    d_state = d_final_SHDV.index_select(0, layout.segment_order)
    slab_backward = _slab_backward if len(tokens) == 4 else delta_rule_backward
    for slab, before_EDV in zip(reversed(layout.slabs), reversed(befores), strict=True):
        parts = slab_backward(slab, d_state, before_EDV, *(slab.take(x) for x in (d_out_THGV, *tokens)))
        for whole, part in zip(gradients, parts, strict=True):
            slab.put(whole, part)
    d_tokens = (g[:-1].view(x.shape) for g, x in zip(gradients, tokens, strict=True))
    return [torch.empty_like(d_state).index_copy_(0, layout.segment_order, d_state), *d_tokens]


def _slab_forward(
    slab: Slab, state: Tensor, q_ECGD: Tensor, k_ECD: Tensor, v_ECV: Tensor, log_decay_ECD: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [E, C, G, V] and the states before each chunk; `state` becomes the states after the slab."""
    q_EXD, tree = q_ECGD.flatten(1, 2), decay_tree(log_decay_ECD.exp_())
    scores_EXC = within_chunks(q_EXD, k_ECD, tree)
    before_EDV = _scan(state, torch.bmm(k_ECD.mT, v_ECV), tree[-1], slab)
    return grouped(torch.bmm(scores_EXC, v_ECV).baddbmm_(q_EXD, before_EDV), q_ECGD.shape[2]), before_EDV


def _slab_backward(
    slab: Slab,
    d_state: Tensor,
    before_EDV: Tensor,
    d_out_ECGV: Tensor,
    q_ECGD: Tensor,
    k_ECD: Tensor,
    v_ECV: Tensor,
    log_decay_ECD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_decay; d_state becomes the gradient of the states before the slab."""
    q_EXD, d_out_EXV = q_ECGD.flatten(1, 2), d_out_ECGV.flatten(1, 2)
    tree = decay_tree(log_decay_ECD.exp())
    gradients = Gradients(torch.zeros_like(q_EXD), torch.zeros_like(k_ECD), torch.zeros_like(k_ECD))
    d_scores_EXC = torch.bmm(d_out_EXV, v_ECV.mT)
    scores_EXC, from_start_ECD, to_end_ECD = within_chunks_backward(q_EXD, k_ECD, tree, d_scores_EXC, gradients)
    q_start_EXD = scaled(q_EXD, from_start_ECD)
    k_end_ECD = k_ECD * to_end_ECD
    d_after_EDV = _scan_backward(d_state, torch.bmm(q_start_EXD.mT, d_out_EXV), tree[-1], slab)
    d_v_ECV = torch.bmm(scores_EXC.mT, d_out_EXV).baddbmm_(k_end_ECD, d_after_EDV)
    gradients.add_reads(q_start_EXD, torch.bmm(d_out_EXV, before_EDV.mT), from_start_ECD)
    gradients.add_writes(k_end_ECD, torch.bmm(v_ECV, d_after_EDV.mT), to_end_ECD)
    gradients.log_decay.add_((d_after_EDV * before_EDV).sum(-1)[:, None] * tree[-1])
    return gradients.q.view_as(q_ECGD), gradients.k, d_v_ECV, gradients.log_decay


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
