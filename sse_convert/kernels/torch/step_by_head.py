"""One new token for each sequence where every head chooses its partitions: only those chosen are touched.

Shape letters: B sequences, H state heads, G query heads of each, K partitions that a head uses, D key dim, V value dim,
P pages: the states of all sequences, partitions and heads.
"""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.kernels.by_head import scaled_keys
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.routing import best_partitions
from sse_convert.kernels.torch.step import decays, mapped_keys


@dc.dataclass(frozen=True, slots=True)
class _Token:
    """What tokens bring to the sparse partitions, or to the shared one."""

    q_BQD: Tensor
    k_BHD: Tensor
    v_BHV: Tensor
    log_decay_BHD: Tensor
    strength_BH: Tensor | None


def steps_by_head(x: Inputs) -> bool:
    """Whether `sse_attention_step_by_head` computes this: one token each, without gradients, from states in one
    piece."""
    state = x.initial_state
    kept = state is not None and state.dtype == x.dtype and state.is_contiguous() and x.state_slots is None
    return x.by_head and x.num_tokens > 0 and x.one_token_each and kept and not x.wants_grad()


def sse_attention_step_by_head(x: Inputs, *, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """Outputs [B, Hq, V] and the states [B, M, H, D, V] after one token of each sequence.

    Args:
        x: the inputs, for which `steps_by_head`.
        inplace_state: write the new states into `x.initial_state` and return it.
    """
    assert x.initial_state is not None
    assert x.read_logits is not None
    state = x.initial_state if inplace_state else x.initial_state.clone()
    pages_PDV = state.view(-1, *state.shape[3:])
    token = _Token(x.q[:, 0], x.k[:, 0], x.v[:, 0], x.log_decay, x.write_strength)
    _write(pages_PDV, x, token, *_chosen(x, x.router_logits, x.top_k, x.write_gate))
    o_BHGV = _read(pages_PDV, x, token, *_chosen(x, x.read_logits, x.top_k, x.read_gate))
    if x.shared is not None:
        shared = _Token(x.shared.q, x.shared.k, x.shared.v, x.shared.log_decay, x.shared.write_strength)
        page_BH1 = _pages(x, torch.full_like(x.router_logits[..., :1], x.num_partitions, dtype=torch.int64))
        weight_BH1 = torch.ones_like(page_BH1, dtype=x.dtype)
        _write(pages_PDV, x, shared, page_BH1, weight_BH1)
        o_BHGV = o_BHGV + _read(pages_PDV, x, shared, page_BH1, weight_BH1)
    return o_BHGV.flatten(1, 2).to(x.v.dtype), state


def _chosen(x: Inputs, logits_BHN: Tensor, top_k: int, gated: bool) -> tuple[Tensor, Tensor]:
    """The pages [B, H, K] of the best partitions, and the weight of each."""
    shape = *logits_BHN.shape[:2], top_k
    e_RK, order_RK = best_partitions(logits_BHN.flatten(0, 1), top_k)
    if x.renormalise:
        e_RK = e_RK / e_RK.sum(1, keepdim=True)
    weight_RK = e_RK if gated else torch.ones_like(e_RK)
    return _pages(x, order_RK.view(shape)), weight_RK.view(shape).to(x.dtype)


def _pages(x: Inputs, partition_BHK: Tensor) -> Tensor:
    """Where the states of some partitions of each head are."""
    B, H = partition_BHK.shape[:2]
    sequence_B, head_H = (torch.arange(n, device=partition_BHK.device) for n in (B, H))
    return (sequence_B[:, None, None] * x.num_states + partition_BHK) * H + head_H[:, None]


def _write(pages_PDV: Tensor, x: Inputs, token: _Token, page_BHK: Tensor, weight_BHK: Tensor) -> None:
    """Decay the states of some pages and add to them, in place."""
    k_BH1D = mapped_keys(scaled_keys(token.k_BHD, x.k_scale), x.k_map, None, x.dtype)[:, :, None]
    decay_BH1D1 = decays(token.log_decay_BHD, x.decay_normalizer, x.dtype)[:, :, None, :, None]
    held_BHKDV = _held(pages_PDV, page_BHK) * decay_BH1D1
    v_BHKV = token.v_BHV.to(x.dtype)[:, :, None]
    if token.strength_BH is not None:
        v_BHKV = v_BHKV - (k_BH1D.unsqueeze(-2) @ held_BHKDV).squeeze(-2)
        weight_BHK = weight_BHK * token.strength_BH.to(x.dtype)[..., None]
    held_BHKDV = held_BHKDV + k_BH1D.unsqueeze(-1) * (weight_BHK[..., None] * v_BHKV).unsqueeze(-2)
    pages_PDV.index_copy_(0, page_BHK.flatten(), held_BHKDV.flatten(0, 2))


def _read(pages_PDV: Tensor, x: Inputs, token: _Token, page_BHK: Tensor, weight_BHK: Tensor) -> Tensor:
    """What queries find [B, H, G, V] in the weighted sum of some pages."""
    together_BHDV = (_held(pages_PDV, page_BHK) * weight_BHK[..., None, None]).sum(2)
    q_BHGD = token.q_BQD.to(x.dtype).reshape(*page_BHK.shape[:2], -1, together_BHDV.shape[2])
    return q_BHGD * x.scale @ together_BHDV


def _held(pages_PDV: Tensor, page_BHK: Tensor) -> Tensor:
    """The states [B, H, K, D, V] of some pages, copied."""
    return pages_PDV.index_select(0, page_BHK.flatten()).view(*page_BHK.shape, *pages_PDV.shape[1:])
