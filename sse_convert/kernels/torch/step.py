"""One new token for each sequence, in as few operators as there are: what decoding on a CPU waits for is their number.

Shape letters: B sequences, K partitions that a token uses, R those and the shared one, M partitions in the state. Where
a field but the first two has R, it may have 1 instead, for all of them.
"""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.feature_maps import KeyFeatureMap, key_feature_map
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.routing import best_partitions

LARGE = 1 << 17
"""bytes of a partition's state from which it is changed where it is, one by one: copies cost more than operators"""


@dc.dataclass(slots=True, kw_only=True)
class TokenInputs:
    """What new tokens bring, one of each sequence, in the dtype of the state."""

    used_BR: Tensor
    """int64, the partitions that each token uses"""
    weight_BR: Tensor
    """their weights, 1 for the shared one"""
    q_BRQD: Tensor
    """scaled"""
    k_BRHD: Tensor
    """scaled and mapped"""
    v_BRHV: Tensor
    decay_BRHD: Tensor
    """or one for all D"""
    strength_BRH: Tensor | None
    """of the delta rule, under no weight; None for gated linear attention"""


def can_step(x: Inputs) -> bool:
    """Whether `sse_attention_step` computes this: one token each, without gradients, from states in one piece, with
    partitions that share q, k and v."""
    state = x.initial_state
    together = x.q.shape[1] == x.k.shape[1] == x.v.shape[1] == 1
    kept = state is not None and state.dtype == x.dtype and state.is_contiguous() and x.state_slots is None
    return x.num_tokens > 0 and x.one_token_each and together and kept and not x.wants_grad()


def sse_attention_step(x: Inputs, *, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """Outputs [B, Hq, V] and the states [B, M, H, D, V] after one token of each sequence, for what `can_step`.

    Args:
        x: the inputs.
        inplace_state: write the new states into `x.initial_state` and return it.
    """
    assert x.initial_state is not None
    state_BMHDV = x.initial_state if inplace_state else x.initial_state.clone()
    o_BQV = advance_states(state_BMHDV, _tokens(x), write_gate=x.write_gate, read_gate=x.read_gate)
    return o_BQV.to(x.v.dtype), state_BMHDV


def advance_states(state_BMHDV: Tensor, x: TokenInputs, *, write_gate: bool, read_gate: bool) -> Tensor:
    """Outputs [B, Hq, V]; the states are overwritten.

    Args:
        state_BMHDV: the states, in one piece.
        x: the tokens.
        write_gate: weigh what is written.
        read_gate: weigh what is read.
    """
    (B, M, H), R = state_BMHDV.shape[:3], x.weight_BR.shape[1]
    weight_BR11 = x.weight_BR.view(B, R, 1, 1)
    pages_SHDV = state_BMHDV.view(B * M, *state_BMHDV.shape[2:])
    used_BR = x.used_BR if B == 1 else x.used_BR + M * torch.arange(B, device=x.used_BR.device)[:, None]
    slots = used_BR.flatten()
    q_BRQD, k_BRHD, strength_BRH1 = x.q_BRQD * weight_BR11 if read_gate else x.q_BRQD, x.k_BRHD, None
    if x.strength_BRH is not None:
        strength_BRH1 = x.strength_BRH[..., None] * weight_BR11 if write_gate else x.strength_BRH[..., None]
    elif write_gate:
        k_BRHD = k_BRHD * weight_BR11
    parts = x.decay_BRHD, k_BRHD, x.v_BRHV, strength_BRH1, q_BRQD.view(*q_BRQD.shape[:2], H, -1, q_BRQD.shape[3])
    if _is_large(pages_SHDV):
        rows = zip(*(_each(part, B, R) for part in parts), strict=True)
        pages = zip(slots.tolist(), rows, strict=True)
        outputs = torch.stack([_advance(pages_SHDV[slot], *row) for slot, row in pages])
        o_BRHGV = outputs.view(B, R, *outputs.shape[1:])
    else:
        held_SHDV = pages_SHDV.index_select(0, slots)
        o_BRHGV = _advance(held_SHDV.view(B, R, *pages_SHDV.shape[1:]), *parts)
        pages_SHDV.index_copy_(0, slots, held_SHDV)
    return o_BRHGV.sum(1).flatten(1, 2)


def _is_large(pages_SHDV: Tensor) -> bool:
    """Whether states change faster one by one where they are than together in a copy."""
    at_hand = pages_SHDV.device.type == "cpu" and not torch.compiler.is_compiling()
    return at_hand and bool(pages_SHDV.nbytes >= LARGE * len(pages_SHDV))


def _each(part: Tensor | None, sequences: int, used: int) -> list[Any]:
    """A part [B, R or 1, ...] for each partition that each token uses."""
    count = sequences * used
    return [None] * count if part is None else list(part.expand(sequences, used, *part.shape[2:]).flatten(0, 1))


def _advance(
    held_HDV: Tensor, decay_HD: Tensor, k_HD: Tensor, v_HV: Tensor, strength_H1: Tensor | None, q_HGD: Tensor
) -> Tensor:
    """What is read [..., H, G, V] of states [..., H, D, V], which decay and are written first, in place."""
    held_HDV.mul_(decay_HD.unsqueeze(-1))
    if strength_H1 is not None:
        v_HV = strength_H1 * (v_HV - (k_HD[..., None, :] @ held_HDV)[..., 0, :])
    held_HDV.addcmul_(k_HD.unsqueeze(-1), v_HV.unsqueeze(-2))
    return q_HGD @ held_HDV


def used_partitions(e: Tensor, order: Tensor, shared: int | None, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """`TokenInputs.used_BR` and `TokenInputs.weight_BR`.

    Args:
        e: [B, K] of the sparse partitions used.
        order: int64 [B, K], which they are.
        shared: index of the shared one; None for none.
        renormalise: divide e by their sum.
    """
    weight = e / e.sum(1, keepdim=True) if renormalise else e
    return (order, weight) if shared is None else (F.pad(order, (0, 1), value=shared), F.pad(weight, (0, 1), value=1.0))


def mapped_keys(k: Tensor, k_map: KeyFeatureMap, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """phi(k) in `dtype` of keys [..., H, D] that k_scale [H] multiplies."""
    k = k.to(dtype)
    return key_feature_map(k if k_scale is None else k * k_scale.to(dtype)[:, None], k_map)


def decays(logits: Tensor, normalizer: float | None, dtype: torch.dtype) -> Tensor:
    """The decay in `dtype`, of its natural log, or of gate logits if there is a normalizer."""
    logits = logits.to(dtype)
    return (logits if normalizer is None else F.logsigmoid(logits) / normalizer).exp()


def _tokens(x: Inputs) -> TokenInputs:
    """The inputs of one token each, row by row."""
    e, order = best_partitions(x.router_logits, x.top_k)
    used_BR, weight_BR = used_partitions(
        e.to(x.dtype), order, x.num_partitions if x.shared else None, renormalise=x.renormalise
    )
    return TokenInputs(
        used_BR=used_BR,
        weight_BR=weight_BR,
        q_BRQD=_rows(x, "q").to(x.dtype) * x.scale,
        k_BRHD=mapped_keys(_rows(x, "k"), x.k_map, x.k_scale, x.dtype),
        v_BRHV=_rows(x, "v").to(x.dtype),
        decay_BRHD=decays(_rows(x, "log_decay"), x.decay_normalizer, x.dtype),
        strength_BRH=None if x.write_strength is None else _rows(x, "write_strength").to(x.dtype),
    )


def _rows(x: Inputs, name: str) -> Tensor:
    """An input [B, R or 1, ...] for the partitions that a token uses."""
    own: Tensor = getattr(x, name)
    own = own if name in ("q", "k", "v") else own[:, None]
    shared: Tensor | None = None if x.shared is None else getattr(x.shared, name)
    if (
        shared is None
        or shared is getattr(x, name)
        or (name == "v" and x.shared is not None and not x.shared.own_values)
    ):
        return own
    return torch.cat([own.expand(-1, x.top_k, *[-1] * (own.dim() - 2)), shared[:, None]], 1)
