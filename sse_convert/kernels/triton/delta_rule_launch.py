"""Launches the kernels of the delta rule around those of gated linear attention."""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.kernels.triton.chunk import (
    Forward,
    Gradients,
    Problem,
    allocate,
    finish,
    prepare_chunks,
    slab_groups,
    states_of_slab,
)
from sse_convert.kernels.triton.chunk_state import state_kernel
from sse_convert.kernels.triton.config import CHUNK
from sse_convert.kernels.triton.delta_rule_kernels import correct_backward_kernel, correct_kernel, inverse_kernel


def run_correction(x: Problem, beta: Tensor) -> tuple[Tensor, Forward]:
    """Corrected values u of every slot [ranks * T, 1, H, V], and what the backward pass needs, with the inverses of the
    chunks' systems in the place of their products.

    Args:
        x: keys in the place of queries, without gates, scale and map; an aligned layout.
        beta: [ranks, T, H] float32, write strengths of the slots, not 0.
    """
    assert not x.packed, "segments must not share chunks"
    (H, V), D, place, tile = x.v.shape[-2:], x.q.shape[-1], x.layout, x.config.correct
    f = allocate(x)
    products = torch.empty_like(f.products, dtype=torch.float32)
    prepare_chunks(x, dc.replace(f, products=products))
    inverse_kernel[(len(products), H)](
        products, beta, place.token, place.out, f.products, H=H, C=CHUNK, IEEE=x.ieee, num_warps=tile.warps
    )
    u = x.v.new_empty(x.ranks * x.q.shape[0], 1, H, V, dtype=corrected_dtype(x.v))
    groups = place.group_first.numel()
    correct_kernel[(groups, H, -(-V // tile.block_v))](
        f.qt, f.kt, f.products, beta, *x.values(), f.decay, place.token, place.out, place.segment, place.head,
        place.load, place.group_first, place.group_end, f.decay if x.initial is None else x.initial, f.entering, u,
        x.num_sequences, place.num_shared_chunks, groups,
        P=x.value_partitions, H=H, D=D, V=V, BD=tile.block_d, BV=tile.block_v, C=CHUNK,
        HAS_STATE=x.initial is not None, IEEE=x.ieee, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return u, f


def corrected_dtype(v: Tensor) -> torch.dtype:
    """Of u: that of v, but for float16, in which small write strengths would leave nothing."""
    return torch.float32 if v.dtype == torch.float16 else v.dtype


def run_correction_backward(x: Problem, saved: Forward, beta: Tensor, du: Tensor) -> tuple[Gradients, Tensor]:
    """Gradients by slot with respect to keys (as queries and as keys), decays, values and initial states, and of beta
    [ranks, T, H].

    Args:
        x: as given to `run_correction`, with its u for v.
        saved: what it returned.
        beta: as given.
        du: [ranks * T, 1, H, V].
    """
    (T, _, H, D), V, place, tile = x.q.shape, x.v.shape[-1], x.layout, x.config.correct
    new, groups, blocks = x.q.new_empty, place.group_first.numel(), -(-V // tile.block_v)
    leaving, d_read = torch.empty_like(saved.entering), new(x.ranks, T, H, V, dtype=x.low)
    d_beta = new(blocks, x.ranks, T, H, dtype=torch.float32)
    d_initial = None if x.initial is None else torch.zeros_like(x.initial)
    correct_backward_kernel[(groups, H, blocks)](
        saved.qt, saved.kt, saved.products, beta, x.v, du, saved.decay, place.token, place.out, place.head,
        place.load, place.group_first, place.group_end, leaving, d_read, d_beta,
        saved.decay if d_initial is None else d_initial, x.ranks * T, groups,
        H=H, D=D, V=V, BD=tile.block_d, BV=tile.block_v, C=CHUNK, HAS_STATE=x.initial is not None, IEEE=x.ieee,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    grads = Gradients(
        dq=new(x.ranks, T, H, D),
        dk=new(x.ranks, T, H, D),
        dg=new(x.ranks, T, H, D, dtype=x.g.dtype),
        dv=d_read.neg(),
        dgate=None,
        dk_scale=None,
        dinitial=d_initial,
    )
    slab = slab_groups(x)
    states, dstates = (new(slab * x.group_chunks, H, D, V, dtype=x.low) for _ in range(2))
    for first in range(0, groups, slab):
        count = min(slab, groups - first)
        states_of_slab(x, saved, states, first, count)
        _state_gradients_of_slab(x, saved, leaving, d_read, dstates, first, count)
        finish(x, saved, d_read, states, dstates, grads, saved.decay, first, count)
    return grads, d_beta.sum(0)


def _state_gradients_of_slab(
    x: Problem, saved: Forward, leaving: Tensor, d_read: Tensor, dstates: Tensor, first: int, count: int
) -> None:
    """The gradient of the state leaving each chunk of `count` groups."""
    H, D, V = leaving.shape[1:]
    place, tile = x.layout, x.config.states
    state_kernel[(count, H, -(-V // tile.block_v))](
        saved.qt, d_read, d_read, saved.decay, place.out, place.segment, place.store, place.group_first,
        place.group_end, saved.decay, leaving, saved.decay, dstates, x.num_sequences, place.num_shared_chunks, first,
        x.group_chunks,
        P=0, H=H, G=1, D=D, V=V, BD=tile.block_d, BV=tile.block_v, C=CHUNK, REVERSE=True, STORE=True, HAS_STATE=False,
        IEEE=x.ieee, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
