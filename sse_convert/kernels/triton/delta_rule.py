"""The delta rule's correction of values as a torch operator with gradients; linear attention does the rest.

`correct` gives every slot its u, what a token really writes. With u for values the SSE operator over gated linear
attention is the one over the gated delta rule, and the gradients of both add up.
"""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.namespace import operator_name
from sse_convert.kernels.triton.chunk import Problem, allocate, sum_slots
from sse_convert.kernels.triton.custom_op import (
    TABLES,
    away_from_zero,
    by_partition,
    layout_of,
    or_empty,
    saved_forward,
    to_save,
)
from sse_convert.kernels.triton.delta_rule_launch import corrected_dtype, run_correction, run_correction_backward


def slot_strengths(x: Inputs, gate: Tensor) -> Tensor:
    """beta of every slot, [ranks, T, H] in float32 and not 0, under the write gate.

    Args:
        x: the inputs, with write strengths.
        gate: [T, K] gates of the partitions that each token uses, those it writes first.
    """
    assert x.write_strength is not None, "gated linear attention has no write strengths"
    written = torch.arange(gate.shape[1], device=gate.device) < x.top_k
    weight = (gate if x.write_gate else torch.ones_like(gate)) * written
    strengths = weight.T[..., None] * x.write_strength.float()
    if x.shared is not None and x.shared.write_strength is not None:
        strengths = torch.cat([strengths, x.shared.write_strength.float()[None]])
    return away_from_zero(strengths).contiguous()


@torch.library.custom_op(operator_name(__name__, "correct"), mutates_args=())
def correct(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    shared_k: Tensor | None,
    shared_g: Tensor | None,
    shared_v: Tensor | None,
    initial: Tensor | None,
    used: Tensor,
    layout: list[Tensor],
    settings: list[int],
    normalizer: float | None,
) -> tuple[Tensor, list[Tensor]]:
    """u of every slot, and what the backward pass needs.

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
        layout: tensors of an aligned layout.
        settings: its number of shared chunks, chunks in a group, whether to save, sequences, top_k.
        normalizer: of gate logits.

    Returns:
        u [ranks * T, 1, H, V] in the order of the layout's `out`.
    """
    x = _problem(k, v, g, shared_k, shared_g, shared_v, initial, used, layout, settings, normalizer)
    u, done = run_correction(x, beta)
    return u, to_save(done if x.save else None, k)


@correct.register_fake
def _correct_fake(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, shared_k: Tensor | None, shared_g: Tensor | None,
    shared_v: Tensor | None, initial: Tensor | None, used: Tensor, layout: list[Tensor], settings: list[int],
    normalizer: float | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    x = _problem(k, v, g, shared_k, shared_g, shared_v, initial, used, layout, settings, normalizer)
    u = v.new_empty(beta.shape[0] * beta.shape[1], 1, *v.shape[-2:], dtype=corrected_dtype(v))
    return u, to_save(allocate(x) if x.save else None, k)


@torch.library.custom_op(operator_name(__name__, "correct_backward"), mutates_args=())
def _correct_backward(
    du: Tensor,
    u: Tensor,
    saved: list[Tensor],
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    shared_k: Tensor | None,
    shared_g: Tensor | None,
    initial: Tensor | None,
    used: Tensor,
    layout: list[Tensor],
    settings: list[int],
    normalizer: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by slot of k, v, g and beta, and of the initial state (empty if none)."""
    x = _problem(k, v, g, shared_k, shared_g, None, initial, used, layout, settings, normalizer)
    x = dc.replace(x, v=u, by_slot=True)
    grads, d_beta = run_correction_backward(x, saved_forward(saved), beta, du)
    return grads.dq + grads.dk, grads.dv.to(v.dtype), grads.dg, d_beta, or_empty(grads.dinitial, k)


@_correct_backward.register_fake
def _correct_backward_fake(
    du: Tensor, u: Tensor, saved: list[Tensor], k: Tensor, v: Tensor, g: Tensor, beta: Tensor, shared_k: Tensor | None,
    shared_g: Tensor | None, initial: Tensor | None, used: Tensor, layout: list[Tensor], settings: list[int],
    normalizer: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (ranks, T, H), D, V = beta.shape, k.shape[-1], v.shape[-1]
    of_state = or_empty(None if initial is None else torch.empty_like(initial), k)
    return (
        k.new_empty(ranks, T, H, D),
        v.new_empty(ranks, T, H, V),
        g.new_empty(ranks, T, H, D),
        torch.empty_like(beta),
        of_state,
    )


def _problem(
    k: Tensor, v: Tensor, g: Tensor, shared_k: Tensor | None, shared_g: Tensor | None, shared_v: Tensor | None,
    initial: Tensor | None, used: Tensor, layout: list[Tensor], settings: list[int], normalizer: float | None,
) -> Problem:  # fmt: skip
    """Keys in the place of queries, without gates (in whose place, not followed, `used` tells their shape)."""
    shared = None
    if shared_k is not None and shared_g is not None:
        shared = (shared_k, shared_k, shared_g, v if shared_v is None else shared_v)
    num_shared_chunks, group_chunks, save, num_sequences, top_k = settings
    return Problem(
        q=k,
        k=k,
        v=v,
        g=g,
        gate=used,
        shared=shared,
        own_values=shared_v is not None,
        k_scale=None,
        initial=initial,
        layout=layout_of(layout, num_shared_chunks),
        packed=False,
        group_chunks=group_chunks,
        save=bool(save),
        num_sequences=num_sequences,
        top_k=top_k,
        read_top_k=top_k,
        write_gate=False,
        read_gate=False,
        scale=1.0,
        k_map="identity",
        normalizer=normalizer,
        corrects=True,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, layout, settings, normalizer = inputs
    ctx.present = [x is not None for x in tensors]
    ctx.options = settings, normalizer
    ctx.save_for_backward(*(x for x in tensors if x is not None), *layout, output[0], *output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, du: Tensor | None, *_: Any) -> tuple[Any, ...]:
    tables = [None] * len(TABLES)
    if du is None:
        return *[None] * 9, tables, None, None
    flat = list(ctx.saved_tensors)
    tensors: list[Any] = [flat.pop(0) if there else None for there in ctx.present]
    k, v, g, beta, shared_k, shared_g, shared_v, initial, used = tensors
    layout, u, saved = flat[: len(TABLES)], flat[len(TABLES)], flat[len(TABLES) + 1 :]
    dk, dv, dg, d_beta, d_initial = _correct_backward(
        du.contiguous(), u, saved, k, v, g, beta, shared_k, shared_g, initial, used, layout, *ctx.options
    )
    K = used.shape[1]
    of_k = by_partition(dk[:K], used, k)
    of_v = by_partition(dv if shared_v is None else dv[:K], used, v)
    of_shared = [None] * 3 if shared_k is None else [dk[K], dg[K], None if shared_v is None else dv[K]]
    of_state = None if initial is None else d_initial
    return of_k, of_v, sum_slots(dg[:K]), d_beta, *of_shared, of_state, None, tables, None, None


torch.library.register_autograd(operator_name(__name__, "correct"), _gradients, setup_context=_setup)
