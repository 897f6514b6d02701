"""Launches the kernels of one forward or backward pass. Everything is allocated here; nothing waits for the device."""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.kernels.triton.chunk_bwd_dqkg import finish_kernel, finish_strong_kernel
from sse_convert.kernels.triton.chunk_bwd_dv import value_gradient_kernel
from sse_convert.kernels.triton.chunk_fwd_intra import prepare_kernel, strong_products_kernel
from sse_convert.kernels.triton.chunk_fwd_o import output_kernel
from sse_convert.kernels.triton.chunk_state import scan_kernel, state_kernel
from sse_convert.kernels.triton.config import block
from sse_convert.kernels.triton.launching import launch
from sse_convert.kernels.triton.problem import ChunkProblem, Forward, SlotGradients, allocate
from sse_convert.kernels.triton.slot_sums import sum_slots

SLAB_BYTES = 2**29
"""most bytes of chunk states that a backward pass holds"""
SEARCHERS = 1056
"""programs that look for the few chunks with strong decays"""
Given = tuple[Tensor | None, ...]


def run_forward(x: ChunkProblem) -> tuple[Tensor, Tensor | None, Forward | None]:
    """o [T, Hq, V], with states the final state [S, M, H, D, V], and what waits for a backward pass, if anything."""
    (T, _, Hq, _), V, s, sources, tile = x.q.shape, x.v.shape[-1], x.settings, x.sources, x.config.output
    adds = tile.heads > 1 and x.shared is not None
    f, final = chunks_of(x, falls=s.keeps), None if x.initial is None else x.initial.clone()
    slots, total = x.v.new_empty(x.ranks - adds, T, Hq, V), x.v.new_empty(T, Hq, V) if adds else None
    for part in parts_of(adds):
        launch(
            output_kernel, (x.num_groups, Hq // tile.heads, -(-V // tile.block_v)),
            f.qd, f.kd, f.products, sources.v, sources.shared_v, f.decay, x.value_rows, x.slots, f.entering, x.initial,
            final, slots, total, T, s.num_sequences, s.num_shared_chunks, shape=x.shape, K=x.gate.shape[1], PART=part,
            Q=tile.heads, BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
        )  # fmt: skip
    return sum_slots(slots) if total is None else total, final, f if s.keeps else None


def chunks_of(x: ChunkProblem, *, falls: bool) -> Forward:
    """What happens inside of chunks, and the states that enter their groups.

    Args:
        x: the problem.
        falls: a backward pass reads the result.
    """
    f = allocate(x, falls=falls)
    prepare_chunks(x, f)
    enter_groups(x, f)
    return f


def parts_of(adds: bool) -> tuple[str, ...]:
    """Launches of a kernel in which, if it `adds`, a token's shared slot adds up what its other slots wrote."""
    return ("sparse", "shared") if adds else ("all",)


def prepare_chunks(x: ChunkProblem, f: Forward) -> None:
    """What happens inside of chunks: fills everything in `f` but states and what is carried to them."""
    (T, _, Hq, D), s, config, sources = x.q.shape, x.settings, x.config, x.sources
    numbers = (s.scale, s.normalizer, T, s.num_sequences, s.num_shared_chunks)
    tile, tasks = config.prepare, x.num_chunks * Hq
    launch(
        prepare_kernel, (tasks // tile.heads,),
        sources, x.slots, f.qt, f.kt, f.packed_q, f.packed_k, f.falls, f.products, f.decay, f.full, f.norms, f.strong,
        *numbers, shape=x.shape, mapping=x.mapping, Q=tile.heads, ROW=block(D), BD=tile.block_d, warps=tile.warps,
    )  # fmt: skip
    tile = config.strong_products
    launch(
        strong_products_kernel, (min(tasks, SEARCHERS),),
        sources, x.slots, f.norms, f.strong, f.products, *numbers, tasks, shape=x.shape, mapping=x.mapping,
        BD=tile.block_d, warps=tile.warps,
    )  # fmt: skip


def run_backward(x: ChunkProblem, saved: Forward, do: Tensor, dfinal: Tensor | None) -> SlotGradients:
    """Gradients with respect to everything, from those of o [T, Hq, V] and of the final state (given with states).

    The states of all chunks would be large, so groups of chunks are finished slab by slab.

    Args:
        x: the problem.
        saved: its forward pass, with falls.
        do: gradient of o.
        dfinal: gradient of the final state.
    """
    (T, _, _, D), (H, V), s = x.q.shape, x.v.shape[-2:], x.settings
    new, blocks = x.q.new_empty, -(-V // x.config.values.block_v)
    leaving = torch.empty_like(saved.entering)
    _entering_states(x, (saved.qd, do, do), x.slots.token, x.slots.store, saved.decay, dfinal, leaving, reverse=True)
    grads, slab = _gradient_memory(x, dfinal), slab_groups(x)
    chunks = slab * s.group_chunks
    states, dstates = (new(chunks, H, D, V, dtype=x.low) for _ in range(2))
    dots = new(blocks, x.ranks, T, H, dtype=torch.float32) if s.k_map == "softmax" else None
    for first in range(0, x.num_groups, slab):
        count = min(slab, x.num_groups - first)
        states_of_slab(x, saved, states, first, count)
        written = dfinal, grads.dinitial, dstates, grads.dv, dots
        _value_gradients(x, saved, do, leaving, written, first, count)
        finish(x, saved, do, (states, dstates, dots), grads, first, count)
    K = x.gate.shape[1]
    dgate = None if grads.dgate is None else grads.dgate[:, :K].sum((0, 3)).T.contiguous()
    return dc.replace(grads, dgate=dgate, dk_scale=None if grads.dk_scale is None else grads.dk_scale.sum((0, 2)))


def _gradient_memory(x: ChunkProblem, dfinal: Tensor | None) -> SlotGradients:
    """Memory for the gradients, those of gates and of k_scale in parts."""
    (T, _, Hq, D), (H, V), s, config = x.q.shape, x.v.shape[-2:], x.settings, x.config
    new, parts = x.q.new_empty, -(-D // min(config.finish.block_d, config.finish_strong.block_d))
    gated = s.write_gate or s.read_gate
    return SlotGradients(
        dq=new(x.ranks, T, Hq, D),
        dk=new(x.ranks, T, H, D, dtype=x.k.dtype),
        dg=new(x.ranks, T, H, D, dtype=x.g.dtype),
        dv=new(x.ranks, T, H, V, dtype=x.v.dtype),
        dgate=new(parts, x.ranks, T, H, dtype=torch.float32).zero_() if gated else None,
        dk_scale=None if x.k_scale is None else new(x.num_chunks, H, parts, dtype=torch.float32).zero_(),
        dinitial=None if dfinal is None else dfinal.clone(),
    )


def slab_groups(x: ChunkProblem) -> int:
    """Groups whose chunks' states are held at a time."""
    (H, V), D = x.v.shape[-2:], x.q.shape[-1]
    return min(x.num_groups, max(1, SLAB_BYTES // (2 * x.settings.group_chunks * H * D * V * x.low.itemsize)))


def states_of_slab(x: ChunkProblem, saved: Forward, states: Tensor, first: int, count: int) -> None:
    """The state entering each chunk of `count` groups."""
    (H, V), s, tile, sources = x.v.shape[-2:], x.settings, x.config.states, x.sources
    launch(
        state_kernel, (count, H, -(-V // tile.block_v)),
        saved.kd, sources.v, sources.shared_v, saved.decay, x.value_rows, x.slots.load, x.slots, x.initial,
        saved.entering, None, states, s.num_sequences, s.num_shared_chunks, first, s.group_chunks,
        shape=x.shape_of(1, x.value_partitions), REVERSE=False, BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages,
        warps=tile.warps, registers=tile.registers if x.initial is None else None,
    )  # fmt: skip


def _value_gradients(
    x: ChunkProblem, saved: Forward, do: Tensor, leaving: Tensor, written: Given, first: int, count: int
) -> None:
    """dv of `count` groups, the gradient of the state leaving each of their chunks, and of initial states."""
    (H, V), s, tile, sources = x.v.shape[-2:], x.settings, x.config.values, x.sources
    launch(
        value_gradient_kernel, (count, H, -(-V // tile.block_v)),
        saved.qd, saved.kd, saved.products, sources.v, sources.shared_v, do, saved.decay, x.slots, leaving, *written,
        s.num_sequences, s.num_shared_chunks, x.ranks * x.q.shape[0], first, s.group_chunks, shape=x.shape,
        BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
    )  # fmt: skip


def finish(
    x: ChunkProblem, saved: Forward, do: Tensor, given: Given, grads: SlotGradients, first: int, count: int
) -> None:
    """The other gradients of `count` groups: every chunk on the fast path, then those with strong decays.

    Args:
        x: the problem.
        saved: its forward pass.
        do: gradient of o.
        given: states of the groups' chunks and their gradients, and v dv of each slot or None.
        grads: to fill in.
        first: the first group.
        count: how many.
    """
    (T, _, _, D), H, s, config = x.q.shape, x.k.shape[2], x.settings, x.config
    places, dots = count * s.group_chunks, given[-1]
    results = (grads.dq, grads.dk, grads.dg, grads.dgate, grads.dk_scale)
    for kernel, tile in ((finish_kernel, config.finish), (finish_strong_kernel, config.finish_strong)):
        strong = kernel is finish_strong_kernel
        grid = min(places * H, SEARCHERS) if strong else places * H * -(-D // tile.block_d)
        launch(
            kernel, (grid,),
            x.sources, do, x.slots, saved.qt, saved.kt, saved.falls, saved.decay, saved.full, saved.norms, saved.strong,
            *given, results, s.scale, s.normalizer, T, s.num_sequences, s.num_shared_chunks,
            x.ranks * T, first, s.group_chunks, *([places] if strong else []), shape=x.shape, mapping=x.mapping,
            Q=tile.heads, BD=tile.block_d, BV=tile.block_v, DOTS=1 if dots is None else dots.shape[0],
            PARTS=1 if grads.dk_scale is None else grads.dk_scale.shape[2],
            BY_SLOT=s.by_slot, STRICT=s.corrects, STAGES=tile.stages, warps=tile.warps, registers=tile.registers,
        )  # fmt: skip


def enter_groups(x: ChunkProblem, f: Forward) -> None:
    """Fill in the state that enters each group."""
    written = f.kd, x.sources.v, x.sources.shared_v
    _entering_states(x, written, x.value_rows, x.slots.load, f.decay, x.initial, f.entering, reverse=False)


def _entering_states(
    x: ChunkProblem, written: tuple[Tensor, Tensor, Tensor], rows: Tensor, inject: Tensor, decay: Tensor,
    ends: Tensor | None, local: Tensor, *, reverse: bool,
) -> None:  # fmt: skip
    """Fills `local` with the state entering each group (leaving it, in reverse), of products of `written`."""
    groups, H, D, V = local.shape
    config, s, heads = x.config, x.settings, written[0].shape[1] // H
    shape = x.shape_of(heads, 0 if reverse else x.value_partitions)
    tile, carry = config.states, torch.empty_like(local[..., 0])
    launch(
        state_kernel, (groups, H, -(-V // tile.block_v)),
        *written, decay, rows, inject, x.slots, ends, local, carry, None,
        s.num_sequences, s.num_shared_chunks, 0, s.group_chunks, shape=shape,
        REVERSE=reverse, BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
    )  # fmt: skip
    tile = config.scan
    launch(
        scan_kernel, (H, -(-D // tile.block_d)), local, carry, groups, shape=shape,
        REVERSE=reverse, ROWS=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
    )  # fmt: skip
