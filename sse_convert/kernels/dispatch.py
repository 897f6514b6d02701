"""The SSE operator: checks its arguments, then runs one of the backends. All backends compute the same thing."""

import dataclasses as dc
from collections.abc import Callable

import torch
from torch import Tensor

from sse_convert.errors import HardwareError, UsageError
from sse_convert.kernels.feature_maps import KeyFeatureMap
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.state_slots import read_states, write_states
from sse_convert.kernels.torch.operands import Operands, operands_of
from sse_convert.kernels.torch.recurrent import sse_attention_recurrent
from sse_convert.kernels.torch.reference import sse_attention_reference
from sse_convert.kernels.torch.step import can_step, sse_attention_step
from sse_convert.kernels.torch.varlen import sse_attention_varlen
from sse_convert.kernels.torch_modes import without_autocast
from sse_convert.kernels.triton_backend import GPU as _GPU
from sse_convert.kernels.triton_backend import (
    sse_attention_on_triton,
    unavailable_reason,
    unsupported_reason,
    untrusted,
)
from sse_convert.kernels.validation import build_inputs

_BACKENDS: dict[str, tuple[Callable[[Operands], tuple[Tensor, Tensor]], str]] = {
    "reference": (sse_attention_reference, "the definition, token by token; slow"),
    "varlen": (sse_attention_varlen, "paper's Algorithm 2: tokens reordered by partition; work grows with k, not N"),
    "recurrent": (sse_attention_recurrent, "decoding: touches the selected partitions' states only"),
}
_TRITON = "GPU kernels for training, prefill and decoding; work grows with k, not N"
BACKENDS = ("auto", *_BACKENDS, "triton")
"""every name, available here or not"""
STATES_AT_ONCE = 1 << 24
"""bytes of states that are computed at a time on a CPU where nobody asks for them; a backend holds several copies"""


def sse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    router_logits: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    *,
    top_k: int,
    write_strength: Tensor | None = None,
    shared_write_strength: Tensor | None = None,
    write_gate: bool = True,
    read_gate: bool = True,
    scale: float | None = None,
    k_map: KeyFeatureMap = "identity",
    k_scale: Tensor | None = None,
    decay_normalizer: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    initial_state: Tensor | None = None,
    state_slots: Tensor | None = None,
    output_final_state: bool = False,
    inplace_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Sparse State Expansion attention over packed sequences; `reference.py` is the definition.

    q and k come normed and rotated; here k is scaled and mapped, and log decays are made of gate logits, if so asked.
    Query head h reads state head h // (Hq // H). Each of q, k and v is one set for all partitions ([T, heads, dim]) or
    one per partition ([T, N, heads, dim]). The torch backends compute in float32 (float64 if q, k or v is float64)
    whatever autocast says; gradients flow to every tensor.

    Args:
        q: [T, Hq, D] or [T, N, Hq, D], Hq a multiple of H.
        k: [T, H, D] or [T, N, H, D].
        v: [T, H, V] or [T, N, H, V].
        log_decay: [T, H, D], natural log of the decay, <= 0 (not checked), or gate logits if decay_normalizer is given;
            expanded views are welcome.
        router_logits: [T, N].
        shared: (q' [T, Hq, D], k' [T, H, D], log_decay' [T, H, D]) of the always-selected partition, with v as its
            values; a fourth entry v' [T, H, V] replaces v and is required when v is per partition. None for no such
            partition.
        top_k: partitions a token decays, writes and reads, 1 to N.
        write_strength: [T, H], beta of the gated delta rule, 0 to 1 (not checked), for keys of norm 1 or less: what the
            key reads in the decayed state is replaced by v to that degree. The write gate multiplies it, since a norm
            of the keys would cancel the gate there. None for gated linear attention, which adds k v.
        shared_write_strength: [T, H], the same for the shared partition; None for write_strength.
        write_gate: multiply what is written by e, the softmax of the router logits.
        read_gate: multiply what is read by e.
        scale: multiplies q and q'; None for D ** -0.5.
        k_map: softmax | silu | relu | l2 | identity, applied to each key of k and k' over D, in float32.
        k_scale: [H], multiplies k and k' before k_map; None for 1.
        decay_normalizer: makes log_decay and log_decay' gate logits, the log decay being logsigmoid(logit) over this
            number, in float32; None takes log_decay as it is.
        cu_seqlens: [S + 1] integer offsets of the sequences in T, first 0, last T; None for one sequence. Values are
            checked on the CPU only.
        max_seqlen: no sequence is longer; lets auto see from offsets on a device that every sequence has one token.
        initial_state: [S, N + 1, H, D, V], partition N is the shared one ([S, N, ...] without it); None for zeros.
        state_slots: [S] integers; the states are in these rows of initial_state, which has any number of them, float32
            or bfloat16 and apart from each other, and become the final ones there; needs inplace_state. A negative one
            stands for a sequence of padding, which has no state.
        output_final_state: return the final state.
        inplace_state: overwrite initial_state (float32, or float64 as the computation) with the final state and return
            it; needs gradients off.
        backend: auto | reference | varlen | recurrent | triton. auto takes triton for what it can run on a GPU; else
            recurrent when every sequence has one token and no gradient is wanted; else varlen.

    Returns:
        o [T, Hq, V] in v's dtype, and the final state like initial_state in float32 (float64), or None.

    Raises:
        ShapeError: a tensor disagrees with the others in shape or kind of dtype.
        UsageError: an argument is out of range, the backend is unknown, or it cannot run the dtype.
        HardwareError: the backend is not available here.

    Source: arXiv:2507.16577, section "SSE" and Algorithms 1 and 2.
    """
    if backend not in BACKENDS:
        raise _unknown(backend)
    with without_autocast(q.device.type):
        x = build_inputs(
            q, k, v, log_decay, router_logits, shared,
            top_k=top_k, write_strength=write_strength,
            shared_write_strength=shared_write_strength, write_gate=write_gate, read_gate=read_gate,
            scale=scale, k_map=k_map, k_scale=k_scale, decay_normalizer=decay_normalizer, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, initial_state=initial_state, state_slots=state_slots,
        )  # fmt: skip
        if inplace_state:
            _check_inplace(x)
        chosen = _chosen(backend, x)
        if x.state_slots is not None:
            o, final = _in_slots(chosen, x, inplace_state), x.initial_state
        elif chosen == "triton":
            o, final = sse_attention_on_triton(x, output_final_state=output_final_state, inplace_state=inplace_state)
        elif output_final_state or not _can_split(x):
            o, final = _on_torch(chosen, x, inplace_state)
        else:
            o, final = _in_head_groups(chosen, x), None
    return o, final if output_final_state else None


def available_backends() -> list[str]:
    """Names that `sse_attention` accepts here, `auto` first."""
    return [name for name in BACKENDS if name != "triton" or unavailable_reason(_gpu(), False) is None]


def explain(backend: str) -> str:
    """One line on what a backend is, or why it is not available."""
    if backend == "triton":
        reason = unavailable_reason(_gpu(), False)
        return _TRITON if reason is None else f"not available: {reason}"
    if backend == "auto":
        fallback = "recurrent for one token per sequence without gradients, else varlen"
        return fallback if unavailable_reason(_gpu(), False) else f"triton for what it can run on a GPU; {fallback}"
    if backend not in _BACKENDS:
        raise _unknown(backend)
    return _BACKENDS[backend][1]


def _gpu() -> torch.device:
    """The device that inputs on a GPU are on, or would be."""
    return torch.device(_GPU, torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _on_torch(backend: str, given: Inputs, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """The backends that take operands and segments."""
    if backend == "recurrent" and can_step(given):
        return sse_attention_step(given, inplace_state=inplace_state)
    if backend == "recurrent":
        o_THGV, final_SMHDV = sse_attention_recurrent(operands_of(given), inplace_state=inplace_state)
    else:
        o_THGV, final_SMHDV = _BACKENDS[backend][0](operands_of(given))
    if inplace_state and backend != "recurrent" and given.initial_state is not None:
        final_SMHDV = given.initial_state.copy_(final_SMHDV)
    return o_THGV.flatten(1, 2).to(given.v.dtype), final_SMHDV


def _in_slots(backend: str, x: Inputs, inplace_state: bool) -> Tensor:
    """The outputs, with states in some rows of a larger tensor, which are overwritten."""
    if not inplace_state:
        raise UsageError("state_slots without inplace_state", expected="inplace_state=True: rows are overwritten")
    slots, pages = x.state_slots, x.initial_state
    assert slots is not None
    assert pages is not None
    if backend == "triton" and x.one_token_each:
        return sse_attention_on_triton(x, output_final_state=True, inplace_state=True)[0]
    own = dc.replace(x, initial_state=read_states(pages, slots), state_slots=None)
    if backend == "triton":
        o, final = sse_attention_on_triton(own, output_final_state=True, inplace_state=False)
    else:
        o, final = _on_torch(backend, own, backend == "recurrent")
    assert final is not None
    write_states(pages, slots, final)
    return o


def _can_split(x: Inputs) -> bool:
    """Whether heads can be computed in turn: no state goes in and no gradient comes back."""
    return x.q.device.type == "cpu" and x.initial_state is None and not x.wants_grad()


def _in_head_groups(backend: str, x: Inputs) -> Tensor:
    """Outputs [T, Hq, V], of a few state heads at a time, whose states are not kept."""
    (heads, key_dim), value_dim = x.k.shape[2:], x.v.shape[3]
    per_head = x.num_sequences * x.num_states * key_dim * value_dim * x.dtype.itemsize
    size = max(1, STATES_AT_ONCE // max(1, per_head))
    groups = [x] if size >= heads else [x.of_heads(i, min(i + size, heads)) for i in range(0, heads, size)]
    return torch.cat([_on_torch(backend, group, False)[0] for group in groups], dim=1)


def _check_inplace(x: Inputs) -> None:
    if x.initial_state is None or (x.initial_state.dtype != x.dtype and x.state_slots is None):
        given = "None" if x.initial_state is None else str(x.initial_state.dtype)
        raise UsageError(f"inplace_state with initial_state {given}", expected=f"an initial_state in {x.dtype}")
    if x.wants_grad():
        raise UsageError(
            "inplace_state with inputs that require gradients",
            expected="gradients off, since the state that a gradient needs is overwritten",
            fix="call it under torch.no_grad()",
        )


def _unknown(backend: str) -> UsageError:
    known = f"one of {', '.join(available_backends())}"
    return UsageError(f"backend is {backend!r}", expected=known)


def _check_triton(x: Inputs) -> None:
    others = f"one of auto, {', '.join(_BACKENDS)}"
    if (reason := unsupported_reason(x)) is not None:
        raise UsageError(f"backend 'triton' cannot run this: {reason}", expected=others, fix="use backend: auto")
    if (reason := untrusted(x)) is not None:
        raise HardwareError(f"backend 'triton' is not available: {reason}", expected=others, fix="use backend: auto")


def _chosen(backend: str, x: Inputs) -> str:
    if backend == "triton":
        _check_triton(x)
    if backend != "auto":
        return backend
    on_gpu = x.q.device.type == _GPU
    if on_gpu and x.num_tokens and unsupported_reason(x) is None and untrusted(x) is None:
        return "triton"
    return "recurrent" if x.one_token_each and not x.wants_grad() else "varlen"
