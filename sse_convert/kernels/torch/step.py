"""One new token for each sequence, in as few operators as there are: what decoding on a CPU waits for is their number.

Shape letters: B sequences, K partitions that a token uses, R those and the shared one, M partitions in the state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.feature_maps import key_feature_map
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.routing import route


def can_step(x: Inputs) -> bool:
    """Whether `sse_attention_step` computes this: one token each, without gradients, from states in one piece, with
    partitions that share q, k and v, and are written where they are read."""
    state, gate = x.initial_state, x.partition_gate
    plain = x.top_k == x.read_top_k and not (gate is not None and gate.needs_state)
    together = x.q.shape[1] == x.k.shape[1] == x.v.shape[1] == 1
    kept = state is not None and state.dtype == x.dtype and state.is_contiguous() and x.state_slots is None
    return x.num_tokens > 0 and x.one_token_each and plain and together and kept and not x.wants_grad()


def sse_attention_step(x: Inputs, *, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """Outputs [B, Hq, V] and the states [B, M, H, D, V] after one token of each sequence, for what `can_step`.

    Args:
        x: the inputs.
        inplace_state: write the new states into `x.initial_state` and return it.
    """
    assert x.initial_state is not None
    state_BMHDV = x.initial_state if inplace_state else x.initial_state.clone()
    (B, M), (H, D) = state_BMHDV.shape[:2], x.k.shape[2:]
    slots_R, weight_BR = _slots(x, M)
    pages_SHDV = state_BMHDV.view(B * M, *state_BMHDV.shape[2:])
    held_BRHDV = pages_SHDV.index_select(0, slots_R).view(*weight_BR.shape, *pages_SHDV.shape[1:])
    held_BRHDV.mul_(_decay(x)[..., None])
    _write(x, held_BRHDV, weight_BR)
    q_BRQD = _rows(x, "q") * _wide(weight_BR * x.scale if x.read_gate else x.scale)
    o_BHGV = (q_BRQD.view(*q_BRQD.shape[:2], H, -1, D) @ held_BRHDV).sum(1)
    pages_SHDV.index_copy_(0, slots_R, held_BRHDV.flatten(0, 1))
    return o_BHGV.flatten(1, 2).to(x.v.dtype), state_BMHDV


def _slots(x: Inputs, states: int) -> tuple[Tensor, Tensor]:
    """Where the states are that the tokens use, int64 [B * R], and their weights [B, R], 1 for the shared one."""
    gate, positions = x.partition_gate, _positions(x)
    routing = route(x.router_logits, x.top_k, None, x.router_bias, partition_gate=gate, positions=positions)
    used_BR = routing.write_TK
    weight_BR = x.renormalised(routing.gate_TN.gather(1, used_BR)).to(x.dtype)
    if x.shared is not None:
        used_BR = F.pad(used_BR, (0, 1), value=x.num_partitions)
        weight_BR = F.pad(weight_BR, (0, 1), value=1.0)
    if x.num_sequences > 1:
        used_BR = used_BR + torch.arange(x.num_sequences, device=used_BR.device)[:, None] * states
    return used_BR.flatten(), weight_BR


def _positions(x: Inputs) -> Tensor | None:
    """Of each token in its sequence, of which it is the first unless positions are given."""
    if x.partition_gate is None or x.positions is not None:
        return x.positions
    return torch.zeros(x.num_tokens, dtype=torch.int64, device=x.router_logits.device)


def _rows(x: Inputs, name: str) -> Tensor:
    """One of q, k and v [B, R or 1, heads, dim] for the partitions that a token uses."""
    own: Tensor = getattr(x, name).to(x.dtype)
    if x.shared is None or (name == "v" and not x.shared.own_values):
        return own
    shared = getattr(x.shared, name).to(x.dtype)
    return torch.cat([own.expand(-1, x.top_k, -1, -1), shared[:, None]], 1)


def _decay(x: Inputs) -> Tensor:
    """[B, R or 1, H, D]."""
    logits = x.log_decay[:, None]
    if x.shared is not None and x.shared.log_decay is not x.log_decay:
        logits = torch.cat([logits.expand(-1, x.top_k, -1, -1), x.shared.log_decay[:, None]], 1)
    logits = logits.to(x.dtype)
    return (logits if x.decay_normalizer is None else F.logsigmoid(logits) / x.decay_normalizer).exp()


def _write(x: Inputs, held_BRHDV: Tensor, weight_BR: Tensor) -> None:
    """Add what the tokens write to decayed states."""
    k_BRHD = _rows(x, "k")
    if x.k_scale is not None:
        k_BRHD = k_BRHD * x.k_scale.to(x.dtype)[:, None]
    k_BRHD, v_BRHV = key_feature_map(k_BRHD, x.k_map), _rows(x, "v")
    strength_BRH = _strength(x)
    if strength_BRH is not None:
        strength_BRH = strength_BRH * weight_BR[..., None] if x.write_gate else strength_BRH
        v_BRHV = strength_BRH[..., None] * (v_BRHV - (k_BRHD[..., None, :] @ held_BRHDV)[..., 0, :])
    elif x.write_gate:
        k_BRHD = k_BRHD * _wide(weight_BR)
    held_BRHDV.addcmul_(k_BRHD[..., None], v_BRHV[..., None, :])


def _strength(x: Inputs) -> Tensor | None:
    """[B, R or 1, H] of the delta rule, under no weight; None without."""
    if x.write_strength is None:
        return None
    own = x.write_strength[:, None].to(x.dtype)
    shared = None if x.shared is None else x.shared.write_strength
    if shared is None or shared is x.write_strength:
        return own
    return torch.cat([own.expand(-1, x.top_k, -1), shared[:, None].to(x.dtype)], 1)


def _wide(weight: Tensor | float) -> Tensor | float:
    """Weights [B, R] for tensors [B, R, heads, dim]."""
    return weight[..., None, None] if isinstance(weight, Tensor) else weight
