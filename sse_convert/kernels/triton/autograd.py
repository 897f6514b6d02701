"""The SSE operator on Triton kernels: routing, layout, and the chunked passes with their gradients."""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch_modes import operator_name
from sse_convert.kernels.triton.chunk import chunks_of, run_backward, run_forward
from sse_convert.kernels.triton.config import CHUNK, group_chunks
from sse_convert.kernels.triton.delta_rule import correct, slot_strengths
from sse_convert.kernels.triton.passes import (
    Pass,
    Tensors,
    by_partition,
    compiled_pass,
    plain_backward,
    plain_forward,
    run_pass,
)
from sse_convert.kernels.triton.problem import ChunkProblem, Forward, Settings, Slots, allocate, slots_of
from sse_convert.kernels.triton.routing import select_partitions, slot_layout
from sse_convert.kernels.triton.slot_sums import sum_slots

PADDING_BEARABLE = 0.25
"""segments share chunks when aligning them would add more than this share of padding"""


def sse_attention_triton(x: Inputs, *, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """`sse_attention` for any number of tokens per sequence.

    Without states, gated linear attention packs many short segments into shared chunks, and all that torch.compile
    traces, whose programs are for any number of sequences; otherwise the results of a token depend on nothing after it
    and on no other sequence, to the bit.

    Returns:
        o [T, Hq, V] in v's dtype, and the final state [S, M, H, D, V] in float32 if wanted.
    """
    if x.num_tokens == 0:
        return _no_tokens(x, output_final_state)
    delta = x.write_strength is not None
    if delta or x.k_map == "l2":
        x = x.with_mapped_keys(x.k.dtype)
    offsets, used_k = x.cu_seqlens.to(x.q.device), x.top_k
    used, gate = select_partitions(x.router_logits, used_k)
    initial = _initial_state(x, output_final_state)
    packed = initial is None and not delta and (is_compiling() or _much_padding(x, used_k))
    group = group_chunks(x.num_tokens * (used_k + 1) // CHUNK, x.q.shape[2])
    layout = slot_layout(
        used, offsets, num_partitions=x.num_partitions, shared=x.shared is not None, packed=packed,
        states=initial is not None, group_chunks=group,
    )  # fmt: skip
    (q, k, v, g), (shared_q, shared_k, shared_g, shared_v) = _tensors(x)
    slots = slots_of(layout)
    settings = Settings(
        num_sequences=x.num_sequences, num_shared_chunks=layout.num_shared_chunks, group_chunks=group,
        packed=packed, save=x.wants_grad(), write_gate=x.write_gate and not delta,
        read_gate=x.read_gate, by_slot=delta, corrects=False, scale=x.scale, normalizer=x.decay_normalizer,
        k_map=x.k_map,
    )  # fmt: skip
    if delta:
        v = correct(k, v, g, slot_strengths(x, gate), shared_k, shared_g, shared_v, initial, used, slots, settings)
        shared_v = None
    given: Tensors = [q, k, v, g, gate, used, shared_q, shared_k, shared_g, shared_v, x.k_scale, initial]
    o, final = run_pass(_PASS, _forward, given, slots, settings)
    assert o is not None
    return o.to(x.v.dtype), final if output_final_state else None


def _no_tokens(x: Inputs, final: bool) -> tuple[Tensor, Tensor | None]:
    o = x.v[:, 0].repeat_interleave(x.q.shape[2] // x.k.shape[2], dim=1)
    for tensor in x.tensors().values():
        o = o + 0 * tensor.sum().to(o.dtype)
    return o, _initial_state(x, final) if final else None


def _initial_state(x: Inputs, final: bool) -> Tensor | None:
    if x.initial_state is not None:
        return x.initial_state.float().contiguous()
    shape = (x.num_sequences, x.num_states, x.k.shape[2], x.k.shape[3], x.v.shape[3])
    return x.q.new_zeros(shape, dtype=torch.float32) if final else None


def _much_padding(x: Inputs, used_k: int) -> bool:
    """Whether aligned segments waste too many slots, if each ends in the middle of a chunk."""
    slots = x.num_tokens * (used_k + (x.shared is not None))
    segments = min(x.num_sequences * x.num_partitions, x.num_tokens * used_k)
    return CHUNK / 2 * (segments + x.num_sequences) > PADDING_BEARABLE * slots


def _tensors(x: Inputs) -> tuple[list[Tensor], list[Tensor | None]]:
    """q, k, v and log decay of the sparse partitions, and q, k, log decay and own v of the shared one, contiguous; in
    common types, since one launch reads both. q and k are both per partition or both are not."""
    P = max(x.q.shape[1], x.k.shape[1])
    sparse = [x.q.expand(-1, P, -1, -1), x.k.expand(-1, P, -1, -1), x.v, x.log_decay]
    if x.shared is None:
        return [tensor.contiguous() for tensor in sparse], [None] * 4
    shared = [x.shared.q, x.shared.k, x.shared.v, x.shared.log_decay]
    types = [torch.promote_types(a.dtype, b.dtype) for a, b in zip(sparse, shared, strict=True)]
    q, k, v, g = (tensor.to(dtype).contiguous() for tensor, dtype in zip(shared, types, strict=True))
    of_all = [tensor.to(dtype).contiguous() for tensor, dtype in zip(sparse, types, strict=True)]
    return of_all, [q, k, g, v if x.shared.own_values else None]


def _problem(tensors: list[Any], slots: Slots, settings: Settings) -> ChunkProblem:
    q, k, v, g, gate, _, *of_shared, shared_v, k_scale, initial = tensors
    return ChunkProblem(
        q=q, k=k, v=v, g=g, gate=gate, shared=None if of_shared[0] is None else tuple(of_shared), shared_v=shared_v,
        k_scale=k_scale, initial=initial, slots=slots, settings=settings,
    )  # fmt: skip


def _run(tensors: Tensors, slots: Slots, settings: Settings) -> tuple[Tensors, Tensors]:
    """o and the final state (None without states), and what `_run_backward` needs."""
    o, final, done = run_forward(_problem(tensors, slots, settings))
    return [o, final], [] if done is None else done.to_save()


def _run_fake(tensors: list[Any], slots: Slots, settings: Settings) -> tuple[Tensors, Tensors]:
    q, v, initial = tensors[0], tensors[2], tensors[-1]
    o = v.new_empty(q.shape[0], q.shape[2], v.shape[-1])
    saved = allocate(_problem(tensors, slots, settings), falls=True).to_save() if settings.keeps else []
    return [o, None if initial is None else torch.empty_like(initial)], saved


def _run_backward(d_results: Tensors, saved: Tensors, tensors: Tensors, slots: Slots, settings: Settings) -> Tensors:
    """Gradients by slot of q, k, g and v; those of the gates, of k_scale and of the initial state."""
    x = _problem(tensors, slots, settings)
    do, dfinal = d_results
    o_shape = (x.q.shape[0], x.q.shape[2], x.v.shape[-1])
    do = x.v.new_zeros(o_shape) if do is None else do.contiguous()
    if x.initial is not None:
        dfinal = torch.zeros_like(x.initial) if dfinal is None else dfinal.contiguous()
    done = Forward.saved(saved) if settings.keeps else chunks_of(x, falls=True)
    grads = run_backward(x, done, do, dfinal)
    return [getattr(grads, field.name) for field in dc.fields(grads)]


def _run_backward_fake(
    d_results: Tensors, saved: Tensors, tensors: Tensors, slots: Slots, settings: Settings
) -> Tensors:
    x = _problem(tensors, slots, settings)
    (T, _, Hq, D), (H, V), gated = x.q.shape, x.v.shape[-2:], settings.write_gate or settings.read_gate
    return [
        x.q.new_empty(x.ranks, T, Hq, D),
        x.k.new_empty(x.ranks, T, H, D),
        x.g.new_empty(x.ranks, T, H, D),
        x.v.new_empty(x.ranks, T, H, V),
        torch.empty_like(x.gate) if gated else None,
        None if x.k_scale is None else torch.empty_like(x.k_scale, dtype=torch.float32),
        None if x.initial is None else torch.empty_like(x.initial),
    ]


def _gradients(by_slot: list[Any], tensors: list[Any], settings: Settings) -> Tensors:
    dq, dk, dg, dv, dgate, dk_scale, dinitial = by_slot
    q, k, v, _, gate, used, shared_q, _, _, shared_v, k_scale, _ = tensors
    K = gate.shape[1]
    sparse: Tensors = [by_partition(x[:K], used, like) for x, like in ((dq, q), (dk, k))]
    of_shared: Tensors = [None] * 4
    if shared_q is not None:
        of_shared = [dq[K], dk[K], dg[K], None if shared_v is None else dv[K]]
    of_values = dv.view_as(v) if settings.by_slot else by_partition(dv if shared_v is None else dv[:K], used, v)
    of_scale = None if k_scale is None else dk_scale.to(k_scale.dtype)
    return [*sparse, of_values, sum_slots(dg[:K]), dgate, None, *of_shared, of_scale, dinitial]


@torch.library.custom_op(operator_name(__name__, "forward"), mutates_args=())
def _forward(
    tensors: list[Tensor], tables: list[Tensor], numbers: list[int], factors: list[float], k_map: str
) -> tuple[list[Tensor], list[Tensor]]:
    return plain_forward(_run, tensors, tables, numbers, factors, k_map)


@_forward.register_fake
def _(
    tensors: list[Tensor], tables: list[Tensor], numbers: list[int], factors: list[float], k_map: str
) -> tuple[list[Tensor], list[Tensor]]:
    return plain_forward(_run_fake, tensors, tables, numbers, factors, k_map)


@torch.library.custom_op(operator_name(__name__, "backward"), mutates_args=())
def _backward(
    d_results: list[Tensor], saved: list[Tensor], tensors: list[Tensor], tables: list[Tensor], numbers: list[int],
    factors: list[float], k_map: str,
) -> list[Tensor]:  # fmt: skip
    return plain_backward(_run_backward, d_results, saved, tensors, tables, numbers, factors, k_map)


@_backward.register_fake
def _(
    d_results: list[Tensor], saved: list[Tensor], tensors: list[Tensor], tables: list[Tensor], numbers: list[int],
    factors: list[float], k_map: str,
) -> list[Tensor]:  # fmt: skip
    return plain_backward(_run_backward_fake, d_results, saved, tensors, tables, numbers, factors, k_map)


_PASS = Pass(_run, _run_backward, _gradients, keeps=0)
compiled_pass(_PASS, _forward, _backward)
