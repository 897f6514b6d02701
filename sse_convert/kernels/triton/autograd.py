"""The SSE operator on Triton kernels: routing, layout, and the chunked passes as torch operators with gradients."""

from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs, position_of_tokens
from sse_convert.kernels.namespace import operator_name
from sse_convert.kernels.triton.chunk import Problem, allocate, run_backward, run_forward, sum_slots
from sse_convert.kernels.triton.config import CHUNK, group_chunks
from sse_convert.kernels.triton.custom_op import (
    TABLES,
    away_from_zero,
    by_partition,
    layout_of,
    or_empty,
    saved_forward,
    tables_of,
    to_save,
)
from sse_convert.kernels.triton.delta_rule import correct, slot_strengths
from sse_convert.kernels.triton.routing import select, select_by, slot_layout

PADDING_BEARABLE = 0.25
"""segments share chunks when aligning them would add more than this share of padding"""


def sse_attention_triton(x: Inputs, *, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """`sse_attention` for any number of tokens per sequence.

    Without states, gated linear attention packs many short segments into shared chunks; otherwise the results of a
    token depend on nothing after it and on no other sequence, to the bit.

    Returns:
        o [T, Hq, V] in v's dtype, and the final state [S, M, H, D, V] in float32 if wanted.
    """
    if x.num_tokens == 0:
        return _no_tokens(x, output_final_state)
    delta = x.write_strength is not None
    if delta or x.k_map == "l2":
        x = x.with_mapped_keys(x.k.dtype)
    offsets, used_k = x.cu_seqlens.to(x.q.device), max(x.top_k, x.read_top_k)
    used, gate = _used(x, offsets, used_k)
    initial = _initial_state(x, output_final_state)
    packed = initial is None and not delta and _much_padding(x, used_k)
    group = group_chunks(x.num_tokens * (used_k + 1) // CHUNK, x.q.shape[2])
    layout = slot_layout(
        used, offsets, num_partitions=x.num_partitions, shared=x.shared is not None, packed=packed,
        states=initial is not None, group_chunks=group,
    )  # fmt: skip
    (q, k, v, g), (shared_q, shared_k, shared_g, shared_v) = _tensors(x)
    tables, save = tables_of(layout), int(x.wants_grad())
    if delta:
        v = correct(
            k, v, g, slot_strengths(x, gate), shared_k, shared_g, shared_v, initial, used, tables,
            [layout.num_shared_chunks, group, save, x.num_sequences, x.top_k], x.decay_normalizer,
        )[0]  # fmt: skip
        shared_v = None
    o, final = _forward(
        q, k, v, g, gate, used, shared_q, shared_k, shared_g, shared_v,
        x.k_scale, initial, tables,
        [layout.num_shared_chunks, int(packed), group, save, x.num_sequences, x.top_k, x.read_top_k,
         int(x.write_gate and not delta), int(x.read_gate), int(delta)],
        x.scale, x.k_map, x.decay_normalizer,
    )[:2]  # fmt: skip
    return o.to(x.v.dtype), final if output_final_state else None


def _used(x: Inputs, offsets: Tensor, used_k: int) -> tuple[Tensor, Tensor]:
    """The partitions of each token and what gates them, [T, K] both."""
    if x.partition_gate is None:
        used, gate = select(x.router_logits, x.router_bias, used_k)
        return used, x.renormalised(gate)
    positions = x.positions
    if positions is None:
        positions = position_of_tokens(offsets, x.num_tokens, offsets.device)
    used, gate = select_by(x.partition_gate, x.router_logits, x.router_bias, used_k, positions)
    return used, away_from_zero(x.renormalised(gate))


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
    """Whether aligned segments waste too many slots, if each ends in the middle of a chunk. Decided when torch.compile
    traces it, also where the number of sequences is a symbol: operators take no undecided truth values."""
    slots = x.num_tokens * (used_k + (x.shared is not None))
    segments = min(x.num_sequences * x.num_partitions, x.num_tokens * used_k)
    if CHUNK / 2 * (segments + x.num_sequences) > PADDING_BEARABLE * slots:  # noqa: SIM103
        return True
    return False


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


@torch.library.custom_op(operator_name(__name__, "forward"), mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gate: Tensor,
    used: Tensor,
    shared_q: Tensor | None,
    shared_k: Tensor | None,
    shared_g: Tensor | None,
    shared_v: Tensor | None,
    k_scale: Tensor | None,
    initial: Tensor | None,
    layout: list[Tensor],
    settings: list[int],
    scale: float,
    k_map: str,
    normalizer: float | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, final state (empty without states), and what `_backward` needs."""
    x = _problem(q, k, v, g, gate, shared_q, shared_k, shared_g, shared_v, k_scale, initial, layout, settings, scale,
                 k_map, normalizer)  # fmt: skip
    o, final, done = run_forward(x)
    return o, or_empty(final, q), to_save(done, q)


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gate: Tensor, used: Tensor, shared_q: Tensor | None,
    shared_k: Tensor | None, shared_g: Tensor | None, shared_v: Tensor | None, k_scale: Tensor | None,
    initial: Tensor | None, layout: list[Tensor], settings: list[int], scale: float, k_map: str,
    normalizer: float | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    x = _problem(q, k, v, g, gate, shared_q, shared_k, shared_g, shared_v, k_scale, initial, layout, settings, scale,
                 k_map, normalizer)  # fmt: skip
    done, o = allocate(x), v.new_empty(q.shape[0], q.shape[2], v.shape[-1])
    return o, or_empty(done.final, q), to_save(done if x.save else None, q)


@torch.library.custom_op(operator_name(__name__, "backward"), mutates_args=())
def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    saved: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gate: Tensor,
    shared_q: Tensor | None,
    shared_k: Tensor | None,
    shared_g: Tensor | None,
    shared_v: Tensor | None,
    k_scale: Tensor | None,
    initial: Tensor | None,
    layout: list[Tensor],
    settings: list[int],
    scale: float,
    k_map: str,
    normalizer: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by slot of q, k, g and v; those of the gates, of k_scale and of the initial state (empty if none)."""
    x = _problem(q, k, v, g, gate, shared_q, shared_k, shared_g, shared_v, k_scale, initial, layout, settings, scale,
                 k_map, normalizer)  # fmt: skip
    grads = run_backward(x, saved_forward(saved), do, dfinal)
    of_gate, of_scale, of_state = (or_empty(grad, q) for grad in (grads.dgate, grads.dk_scale, grads.dinitial))
    return grads.dq, grads.dk, grads.dg, grads.dv, of_gate, of_scale, of_state


@_backward.register_fake
def _backward_fake(
    do: Tensor, dfinal: Tensor | None, saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor, gate: Tensor,
    shared_q: Tensor | None, shared_k: Tensor | None, shared_g: Tensor | None, shared_v: Tensor | None,
    k_scale: Tensor | None, initial: Tensor | None, layout: list[Tensor], settings: list[int], scale: float,
    k_map: str, normalizer: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x = _problem(q, k, v, g, gate, shared_q, shared_k, shared_g, shared_v, k_scale, initial, layout, settings, scale,
                 k_map, normalizer)  # fmt: skip
    (T, _, Hq, D), (H, V), gated = q.shape, v.shape[-2:], x.write_gate or x.read_gate
    return (
        q.new_empty(x.ranks, T, Hq, D),
        k.new_empty(x.ranks, T, H, D),
        g.new_empty(x.ranks, T, H, D),
        v.new_empty(x.ranks, T, H, V),
        or_empty(torch.empty_like(gate) if gated else None, q),
        or_empty(None if k_scale is None else torch.empty_like(k_scale, dtype=torch.float32), q),
        or_empty(None if dfinal is None else torch.empty_like(dfinal), q),
    )


def _problem(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gate: Tensor, shared_q: Tensor | None, shared_k: Tensor | None,
    shared_g: Tensor | None, shared_v: Tensor | None, k_scale: Tensor | None, initial: Tensor | None,
    layout: list[Tensor], settings: list[int], scale: float, k_map: str, normalizer: float | None,
) -> Problem:  # fmt: skip
    shared = None
    if shared_q is not None and shared_k is not None and shared_g is not None:
        shared = (shared_q, shared_k, shared_g, v if shared_v is None else shared_v)
    return Problem(
        q=q,
        k=k,
        v=v,
        g=g,
        gate=gate,
        shared=shared,
        own_values=shared_v is not None,
        k_scale=k_scale,
        initial=initial,
        layout=layout_of(layout, settings[0]),
        packed=bool(settings[1]),
        group_chunks=settings[2],
        save=bool(settings[3]),
        num_sequences=settings[4],
        top_k=settings[5],
        read_top_k=settings[6],
        write_gate=bool(settings[7]),
        read_gate=bool(settings[8]),
        scale=scale,
        k_map=k_map,
        normalizer=normalizer,
        by_slot=bool(settings[9]),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, layout, settings, scale, k_map, normalizer = inputs
    ctx.present = [x is not None for x in tensors]
    ctx.options = settings, scale, k_map, normalizer
    ctx.save_for_backward(*(x for x in tensors if x is not None), *layout, *output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
    flat = list(ctx.saved_tensors)
    tensors: list[Any] = [flat.pop(0) if there else None for there in ctx.present]
    q, k, v, g, gate, used, shared_q, _, _, shared_v, k_scale, initial = tensors
    layout, saved = flat[: len(TABLES)], flat[len(TABLES) :]
    do = v.new_zeros(q.shape[0], q.shape[2], v.shape[-1]) if do is None else do.contiguous()
    if initial is not None:
        dfinal = torch.zeros_like(initial) if dfinal is None else dfinal.contiguous()
    dq, dk, dg, dv, dgate, dk_scale, dinitial = _backward(
        do, None if initial is None else dfinal, saved, q, k, v, g, gate, *tensors[6:], layout, *ctx.options
    )
    K = gate.shape[1]
    sparse = [by_partition(x[:K], used, like) for x, like in ((dq, q), (dk, k))]
    of_shared = [None] * 4 if shared_q is None else [dq[K], dk[K], dg[K], None if shared_v is None else dv[K]]
    by_slot = bool(ctx.options[0][9])
    dv = dv.view_as(v) if by_slot else by_partition(dv if shared_v is None else dv[:K], used, v)
    of_gate = dgate if dgate.numel() else None
    of_scale = None if k_scale is None else dk_scale.to(k_scale.dtype)
    of_state = None if initial is None else dinitial
    tables = [None] * len(TABLES)
    return *sparse, dv, sum_slots(dg[:K]), of_gate, None, *of_shared, of_scale, of_state, tables, *[None] * 4


torch.library.register_autograd(operator_name(__name__, "forward"), _gradients, setup_context=_setup)
