"""One new token for each sequence where every head chooses its partitions: only those chosen are touched.

Shape letters: B sequences, H state heads, G query heads of each, K partitions that a head uses, D key dim, V value dim,
P pages: the states of all sequences, partitions and heads.
"""

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.routing import best_partitions
from sse_convert.kernels.torch.step import decays, mapped_keys


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
    written_BHK, weight_BHK = _chosen(x, x.router_logits, x.top_k, x.write_gate)
    _write(pages_PDV, x, written_BHK, weight_BHK)
    read_BHK, weight_BHK = _chosen(x, x.read_logits, x.read_top_k, x.read_gate)
    return _read(pages_PDV, x, read_BHK, weight_BHK).flatten(1, 2).to(x.v.dtype), state


def _chosen(x: Inputs, logits_BHN: Tensor, top_k: int, gated: bool) -> tuple[Tensor, Tensor]:
    """Pages of the state, and the weight of each."""
    B, H = logits_BHN.shape[:2]
    e_RK, order_RK = best_partitions(logits_BHN.flatten(0, 1), top_k)
    if x.renormalise:
        e_RK = e_RK / e_RK.sum(1, keepdim=True)
    weight = e_RK.view(B, H, top_k).to(x.dtype) if gated else e_RK.new_ones(B, H, top_k, dtype=x.dtype)
    partition = order_RK.view(B, H, top_k)
    sequence, head = (torch.arange(n, device=partition.device) for n in (B, H))
    return (sequence[:, None, None] * x.num_states + partition) * H + head[:, None], weight


def _write(pages_PDV: Tensor, x: Inputs, page_BHK: Tensor, weight_BHK: Tensor) -> None:
    """Decay and write the pages that are chosen, and the shared partition's."""
    strength = None if x.write_strength is None else x.write_strength.to(x.dtype)
    _advance(pages_PDV, page_BHK, x, (x.k[:, 0], x.v[:, 0], x.log_decay, strength), weight_BHK)
    if x.shared is not None:
        own = x.shared
        strength = None if own.write_strength is None else own.write_strength.to(x.dtype)
        page_BH1 = _shared_pages(x)
        _advance(pages_PDV, page_BH1, x, (own.k, own.v, own.log_decay, strength), weight_BHK.new_ones(page_BH1.shape))


def _advance(
    pages_PDV: Tensor,
    page_BHK: Tensor,
    x: Inputs,
    written: tuple[Tensor, Tensor, Tensor, Tensor | None],
    weight_BHK: Tensor,
) -> None:
    k, v, log_decay, strength_BH = written
    k_BH1D = mapped_keys(k, x.k_map, x.k_scale, x.dtype)[:, :, None]
    decay_BH1D = decays(log_decay, x.decay_normalizer, x.dtype)[:, :, None]
    held = pages_PDV.index_select(0, page_BHK.flatten()).view(*page_BHK.shape, *pages_PDV.shape[1:])
    held = held * decay_BH1D.unsqueeze(-1)
    v_BHKV = v.to(x.dtype)[:, :, None]
    if strength_BH is not None:
        v_BHKV = v_BHKV - (k_BH1D.unsqueeze(-2) @ held).squeeze(-2)
        weight_BHK = weight_BHK * strength_BH[..., None]
    held = held + k_BH1D.unsqueeze(-1) * (weight_BHK[..., None] * v_BHKV).unsqueeze(-2)
    pages_PDV.index_copy_(0, page_BHK.flatten(), held.flatten(0, 2))


def _read(pages_PDV: Tensor, x: Inputs, page_BHK: Tensor, weight_BHK: Tensor) -> Tensor:
    """What queries read [B, H, G, V]."""
    o = _looked_up(pages_PDV, page_BHK, weight_BHK, x.q[:, 0], x)
    if x.shared is None:
        return o
    page_BH1 = _shared_pages(x)
    return o + _looked_up(pages_PDV, page_BH1, weight_BHK.new_ones(page_BH1.shape), x.shared.q, x)


def _looked_up(pages_PDV: Tensor, page_BHK: Tensor, weight_BHK: Tensor, q: Tensor, x: Inputs) -> Tensor:
    held_BHKDV = pages_PDV.index_select(0, page_BHK.flatten()).view(*page_BHK.shape, *pages_PDV.shape[1:])
    together_BHDV = (held_BHKDV * weight_BHK[..., None, None]).sum(2)
    q_BHGD = q.to(x.dtype).view(*page_BHK.shape[:2], -1, q.shape[-1])
    return q_BHGD * x.scale @ together_BHDV


def _shared_pages(x: Inputs) -> Tensor:
    """[B, H, 1], the pages of the shared partition."""
    H = x.k.shape[2]
    sequence, head = (torch.arange(n, device=x.q.device) for n in (x.num_sequences, H))
    return ((sequence[:, None] * x.num_states + x.num_partitions) * H + head)[..., None]
