"""The delta rule's correction of values, with gradients; linear attention does the rest.

`correct` gives every slot its u, what a token really writes. With u for values the SSE operator over gated linear
attention is the one over the gated delta rule, and the gradients of both add up.
"""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch_modes import operator_name
from sse_convert.kernels.triton.chunk import enter_groups, finish, prepare_chunks, slab_groups, states_of_slab
from sse_convert.kernels.triton.chunk_state import state_kernel
from sse_convert.kernels.triton.delta_rule_kernels import correct_backward_kernel, correct_kernel, inverse_kernel
from sse_convert.kernels.triton.launching import launch
from sse_convert.kernels.triton.passes import (
    Pass,
    Tensors,
    away_from_zero,
    by_partition,
    compiled_pass,
    plain_backward,
    plain_forward,
    run_pass,
)
from sse_convert.kernels.triton.problem import (
    ChunkProblem,
    Forward,
    Settings,
    SlotGradients,
    Slots,
    allocate,
)
from sse_convert.kernels.triton.slot_sums import sum_slots


def slot_strengths(x: Inputs, gate: Tensor) -> Tensor:
    """beta of every slot, [ranks, T, H] in float32 and not 0, under the write gate.

    Args:
        x: the inputs, with write strengths.
        gate: [T, K] gates of the partitions that each token uses.
    """
    assert x.write_strength is not None, "gated linear attention has no write strengths"
    weight = gate if x.write_gate else torch.ones_like(gate)
    strengths = weight.T[..., None] * x.write_strength.float()
    if x.shared is not None and x.shared.write_strength is not None:
        strengths = torch.cat([strengths, x.shared.write_strength.float()[None]])
    return away_from_zero(strengths).contiguous()


def correct(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, shared_k: Tensor | None, shared_g: Tensor | None,
    shared_v: Tensor | None, initial: Tensor | None, used: Tensor, slots: Slots, settings: Settings,
) -> Tensor:  # fmt: skip
    """u of every slot.

    Args:
        k: [T, P, H, D], mapped.
        v: [T, P, H, V].
        g: [T, H, D] log decays, or gate logits when there is a normalizer.
        beta: [ranks, T, H] from `slot_strengths`.
        shared_k: [T, H, D] of the shared partition, if there is one.
        shared_g: [T, H, D], the same.
        shared_v: [T, H, V], if it has values of its own.
        initial: [S, M, H, D, V] float32 or None.
        used: int32 [T, K].
        slots: tables of an aligned layout.
        settings: of the attention that u is for.

    Returns:
        u [ranks * T, 1, H, V] in the order of the layout's `out`.
    """
    own = dc.replace(
        settings, write_gate=False, read_gate=False, by_slot=False, corrects=True, scale=1.0,
        k_map="identity",
    )  # fmt: skip
    (u,) = run_pass(_PASS, _correct, [k, v, g, beta, shared_k, shared_g, shared_v, initial, used], slots, own)
    assert u is not None
    return u


def run_correction(x: ChunkProblem, beta: Tensor) -> Tensor:
    """Corrected values u of every slot [ranks * T, 1, H, V].

    Args:
        x: keys in the place of queries, without gates, scale and map; an aligned layout.
        beta: [ranks, T, H] float32, write strengths of the slots, not 0.
    """
    assert not x.settings.packed, "segments must not share chunks"
    (H, V), s, tile, sources = x.v.shape[-2:], x.settings, x.config.correct, x.sources
    f = _inverted(x, beta, falls=False)
    u = x.v.new_empty(x.ranks * x.q.shape[0], 1, H, V, dtype=corrected_dtype(x.v))
    launch(
        correct_kernel, (x.num_groups, H, -(-V // tile.block_v)),
        f.qt, f.kt, f.products, beta, sources.v, sources.shared_v, f.decay, x.slots, x.initial, f.entering, u,
        s.num_sequences, s.num_shared_chunks, x.num_groups, shape=x.shape,
        BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
    )  # fmt: skip
    return u


def _inverted(x: ChunkProblem, beta: Tensor, *, falls: bool) -> Forward:
    """What happens inside of chunks, with the inverses of their systems in the place of their products."""
    f, H = allocate(x, falls=falls), x.k.shape[2]
    products = torch.empty_like(f.products, dtype=torch.float32)
    prepare_chunks(x, dc.replace(f, products=products))
    grid, warps = (x.num_chunks, H), x.config.correct.warps
    launch(inverse_kernel, grid, products, beta, x.slots, f.products, shape=x.shape, warps=warps)
    return f


def corrected_dtype(v: Tensor) -> torch.dtype:
    """Of u: that of v, but for float16, in which small write strengths would leave nothing."""
    return torch.float32 if v.dtype == torch.float16 else v.dtype


def run_correction_backward(x: ChunkProblem, beta: Tensor, du: Tensor) -> tuple[SlotGradients, Tensor]:
    """Gradients by slot with respect to keys (as queries and as keys), decays, values and initial states, and of beta
    [ranks, T, H].

    Args:
        x: as given to `run_correction`, with its u for v.
        beta: as given.
        du: [ranks * T, 1, H, V].
    """
    (T, _, H, D), V, tile, groups = x.q.shape, x.v.shape[-1], x.config.correct, x.num_groups
    new, blocks, saved = x.q.new_empty, -(-V // tile.block_v), _inverted(x, beta, falls=True)
    enter_groups(x, saved)
    leaving, d_read = torch.empty_like(saved.entering), new(x.ranks, T, H, V, dtype=x.low)
    d_beta = new(blocks, x.ranks, T, H, dtype=torch.float32)
    d_initial = None if x.initial is None else torch.zeros_like(x.initial)
    launch(
        correct_backward_kernel, (groups, H, blocks),
        saved.qt, saved.kt, saved.products, beta, x.v, du, saved.decay, x.slots, leaving, d_read, d_beta, d_initial,
        x.ranks * T, groups, shape=x.shape, BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps,
    )  # fmt: skip
    grads = SlotGradients(
        dq=new(x.ranks, T, H, D),
        dk=new(x.ranks, T, H, D),
        dg=new(x.ranks, T, H, D, dtype=x.g.dtype),
        dv=d_read.neg(),
        dgate=None,
        dk_scale=None,
        dinitial=d_initial,
    )
    slab = slab_groups(x)
    states, dstates = (new(slab * x.settings.group_chunks, H, D, V, dtype=x.low) for _ in range(2))
    for first in range(0, groups, slab):
        count = min(slab, groups - first)
        states_of_slab(x, saved, states, first, count)
        _state_gradients_of_slab(x, saved, leaving, d_read, dstates, first, count)
        finish(x, saved, d_read, (states, dstates, None), grads, first, count)
    return grads, d_beta.sum(0)


def _state_gradients_of_slab(
    x: ChunkProblem, saved: Forward, leaving: Tensor, d_read: Tensor, dstates: Tensor, first: int, count: int
) -> None:
    """The gradient of the state leaving each chunk of `count` groups."""
    (H, V), s, tile = leaving.shape[1::2], x.settings, x.config.states
    launch(
        state_kernel, (count, H, -(-V // tile.block_v)),
        saved.qt, d_read, d_read, saved.decay, x.slots.out, x.slots.store, x.slots, None, leaving, None, dstates,
        s.num_sequences, s.num_shared_chunks, first, s.group_chunks, shape=x.shape_of(1, 0),
        REVERSE=True, BD=tile.block_d, BV=tile.block_v, STAGES=tile.stages, warps=tile.warps, registers=tile.registers,
    )  # fmt: skip


def _problem(tensors: list[Any], slots: Slots, settings: Settings) -> ChunkProblem:
    """Keys in the place of queries, without gates (in whose place, not followed, `used` tells their shape)."""
    k, v, g, _, shared_k, shared_g, shared_v, initial, used = tensors
    return ChunkProblem(
        q=k, k=k, v=v, g=g, gate=used, shared=None if shared_k is None else (shared_k, shared_k, shared_g),
        shared_v=shared_v, k_scale=None, initial=initial, slots=slots, settings=settings,
    )  # fmt: skip


def _run(tensors: list[Any], slots: Slots, settings: Settings) -> tuple[Tensors, Tensors]:
    return [run_correction(_problem(tensors, slots, settings), tensors[3])], []


def _run_fake(tensors: list[Any], slots: Slots, settings: Settings) -> tuple[Tensors, Tensors]:
    v, beta = tensors[1], tensors[3]
    u = v.new_empty(beta.shape[0] * beta.shape[1], 1, *v.shape[-2:], dtype=corrected_dtype(v))
    return [u], []


def _run_backward(
    d_results: list[Any], saved: list[Any], tensors: list[Any], slots: Slots, settings: Settings
) -> Tensors:  # fmt: skip
    """Gradients by slot of k, v, g and beta, and of the initial state."""
    x = _problem(tensors, slots, dc.replace(settings, by_slot=True))
    x = dc.replace(x, v=saved[0], shared_v=None)
    grads, d_beta = run_correction_backward(x, tensors[3], d_results[0].contiguous())
    return [grads.dq + grads.dk, grads.dv.to(tensors[1].dtype), grads.dg, d_beta, grads.dinitial]


def _run_backward_fake(
    d_results: list[Any], saved: list[Any], tensors: list[Any], slots: Slots, settings: Settings
) -> Tensors:  # fmt: skip
    k, v, g, beta, *_, initial, _ = tensors
    (ranks, T, H), D, V = beta.shape, k.shape[-1], v.shape[-1]
    return [
        k.new_empty(ranks, T, H, D),
        v.new_empty(ranks, T, H, V),
        g.new_empty(ranks, T, H, D),
        torch.empty_like(beta),
        None if initial is None else torch.empty_like(initial),
    ]


def _gradients(by_slot: list[Any], tensors: list[Any], settings: Settings) -> Tensors:
    dk, dv, dg, d_beta, d_initial = by_slot
    k, v, _, _, shared_k, _, shared_v, _, used = tensors
    K = used.shape[1]
    of_v = by_partition(dv if shared_v is None else dv[:K], used, v)
    of_shared = [None] * 3 if shared_k is None else [dk[K], dg[K], None if shared_v is None else dv[K]]
    return [by_partition(dk[:K], used, k), of_v, sum_slots(dg[:K]), d_beta, *of_shared, d_initial, None]


@torch.library.custom_op(operator_name(__name__, "correct"), mutates_args=())
def _correct(
    tensors: list[Tensor], tables: list[Tensor], numbers: list[int], factors: list[float], k_map: str
) -> tuple[list[Tensor], list[Tensor]]:
    return plain_forward(_run, tensors, tables, numbers, factors, k_map)


@_correct.register_fake
def _(
    tensors: list[Tensor], tables: list[Tensor], numbers: list[int], factors: list[float], k_map: str
) -> tuple[list[Tensor], list[Tensor]]:
    return plain_forward(_run_fake, tensors, tables, numbers, factors, k_map)


@torch.library.custom_op(operator_name(__name__, "correct_backward"), mutates_args=())
def _correct_backward(
    d_results: list[Tensor], saved: list[Tensor], tensors: list[Tensor], tables: list[Tensor], numbers: list[int],
    factors: list[float], k_map: str,
) -> list[Tensor]:  # fmt: skip
    return plain_backward(_run_backward, d_results, saved, tensors, tables, numbers, factors, k_map)


@_correct_backward.register_fake
def _(
    d_results: list[Tensor], saved: list[Tensor], tensors: list[Tensor], tables: list[Tensor], numbers: list[int],
    factors: list[float], k_map: str,
) -> list[Tensor]:  # fmt: skip
    return plain_backward(_run_backward_fake, d_results, saved, tensors, tables, numbers, factors, k_map)


_PASS = Pass(_run, _run_backward, _gradients, keeps=1)
compiled_pass(_PASS, _correct, _correct_backward)
