"""One new token for each sequence, in as few operators as there are: what decoding on a CPU waits for is their number.

Shape letters: B sequences, K partitions that a token uses, R those and the shared one, M partitions in the state, S all
of all sequences. What a token brings may have 1 for R, for all of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.feature_maps import KeyFeatureMap, key_feature_map
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.routing import best_partitions

LARGE = 1 << 17
"""bytes of a partition's state from which it is changed where it is, one by one: copies cost more than operators"""


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
    (B, M, H), (used_BR, weight_BR) = state_BMHDV.shape[:3], _used(x)
    weight_BR11 = weight_BR[..., None, None]
    q_BRQD, v_BRHV = _rows(x, "q").to(x.dtype) * x.scale, _rows(x, "v").to(x.dtype)
    k_BRHD = mapped_keys(_rows(x, "k"), x.k_map, x.k_scale, x.dtype)
    decay_BRHD = decays(_rows(x, "log_decay"), x.decay_normalizer, x.dtype)
    strength_BRH1 = None
    if x.read_gate:
        q_BRQD = q_BRQD * weight_BR11
    if x.write_strength is not None:
        strength_BRH1 = _rows(x, "write_strength").to(x.dtype)[..., None] * (weight_BR11 if x.write_gate else 1)
    elif x.write_gate:
        k_BRHD = k_BRHD * weight_BR11
    parts = decay_BRHD, k_BRHD, v_BRHV, strength_BRH1, q_BRQD.view(*q_BRQD.shape[:2], H, -1, q_BRQD.shape[3])
    o_BRHGV = _advanced(state_BMHDV, used_BR + M * torch.arange(B, device=used_BR.device)[:, None], parts)
    return o_BRHGV.sum(1).flatten(1, 2).to(x.v.dtype), state_BMHDV


def _used(x: Inputs) -> tuple[Tensor, Tensor]:
    """The partitions that each token uses, int64 [B, R], and their weights, 1 for the shared one."""
    e_BK, used_BK = best_partitions(x.router_logits, x.top_k)
    weight_BK = e_BK.to(x.dtype)
    if x.shared is None:
        return used_BK, weight_BK
    return F.pad(used_BK, (0, 1), value=x.num_partitions), F.pad(weight_BK, (0, 1), value=1.0)


def _advanced(state_BMHDV: Tensor, page_BR: Tensor, parts: tuple[Any, ...]) -> Tensor:
    """What is read [B, R, H, G, V]; the states of some pages, sequence by sequence, are overwritten."""
    (B, R), pages_SHDV = page_BR.shape, state_BMHDV.view(-1, *state_BMHDV.shape[2:])
    slots = page_BR.flatten()
    if _is_large(pages_SHDV):
        rows = zip(*(_each(part, B, R) for part in parts), strict=True)
        pages = zip(slots.tolist(), rows, strict=True)
        outputs = torch.stack([_advance(pages_SHDV[slot], *row) for slot, row in pages])
        return outputs.view(B, R, *outputs.shape[1:])
    held_SHDV = pages_SHDV.index_select(0, slots)
    o_BRHGV = _advance(held_SHDV.view(B, R, *pages_SHDV.shape[1:]), *parts)
    pages_SHDV.index_copy_(0, slots, held_SHDV)
    return o_BRHGV


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


def mapped_keys(k: Tensor, k_map: KeyFeatureMap, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """phi(k) in `dtype` of keys [..., H, D] that k_scale [H] multiplies."""
    k = k.to(dtype)
    return key_feature_map(k if k_scale is None else k * k_scale.to(dtype)[:, None], k_map)


def decays(logits: Tensor, normalizer: float | None, dtype: torch.dtype) -> Tensor:
    """The decay in `dtype`, of its natural log, or of gate logits if there is a normalizer."""
    logits = logits.to(dtype)
    return (logits if normalizer is None else F.logsigmoid(logits) / normalizer).exp()


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
