"""What the torch backends compute with: the inputs in the computing dtype, scaled and mapped."""

import dataclasses as dc
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.feature_maps import key_feature_map
from sse_convert.kernels.inputs import Inputs, SharedInputs, sequence_of_tokens
from sse_convert.kernels.routing import Routing, route


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class SharedOperands:
    """Inputs of the partition that every token uses, without gate."""

    q_THGD: Tensor
    """queries, scaled"""
    k_THD: Tensor
    """keys after the feature map"""
    v_THV: Tensor
    """values"""
    log_decay_THD: Tensor
    """natural log of the decay, <= 0"""
    write_strength_TH: Tensor | None
    """beta of the delta rule; None for gated linear attention"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Inputs of one call, all in float32 or all in float64. P is 1 when the partitions share q, k and v, else N."""

    q_TPHGD: Tensor
    """queries, scaled"""
    k_TPHD: Tensor
    """keys after the feature map"""
    v_TPHV: Tensor
    """values"""
    log_decay_THD: Tensor
    """natural log of the decay, <= 0"""
    write_strength_TH: Tensor | None
    """beta of the delta rule; None for gated linear attention"""
    router_logits_TN: Tensor
    """router outputs"""
    shared: SharedOperands | None
    """the shared partition, or None"""
    state_SMHDV: Tensor
    """initial states; partition N is the shared one"""
    cu_seqlens: Tensor
    """[S + 1] int64 offsets of the sequences, on the CPU or on the device of q"""
    one_token_each: bool
    """every sequence is known to have one token"""
    top_k: int
    """partitions written and read"""
    write_gate: bool
    """scale what is written by e"""
    read_gate: bool
    """scale what is read by e"""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.router_logits_TN.shape[0]

    @property
    def num_partitions(self) -> int:
        """N, without the shared partition."""
        return self.router_logits_TN.shape[1]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    def wants_grad(self) -> bool:
        """Whether a gradient to any input is recorded."""
        own = [self.q_TPHGD, self.k_TPHD, self.v_TPHV, self.log_decay_THD, self.router_logits_TN, self.state_SMHDV]
        strengths = [self.write_strength_TH]
        if self.shared is not None:
            own += [self.shared.q_THGD, self.shared.k_THD, self.shared.v_THV, self.shared.log_decay_THD]
            strengths.append(self.shared.write_strength_TH)
        own += [strength for strength in strengths if strength is not None]
        return torch.is_grad_enabled() and any(x.requires_grad for x in own)

    def spans(self) -> list[tuple[int, int]]:
        """First and end token of each sequence (a device sync when cu_seqlens is not on the CPU)."""
        return list(pairwise(self.cu_seqlens.tolist()))

    def sequences(self) -> Tensor:
        """int64 [T] index of the sequence each token belongs to."""
        return sequence_of_tokens(self.cu_seqlens, self.num_tokens, self.router_logits_TN.device)

    def route(self) -> Routing:
        """The routing of all tokens."""
        return self.route_rows(self.router_logits_TN)

    def route_rows(self, logits_RN: Tensor) -> Routing:
        """The routing of some tokens, under this call's settings."""
        return route(logits_RN, self.top_k)


def operands_of(x: Inputs) -> Operands:
    """The inputs as the torch backends take them: q times the scale, phi(k_scale * k), and log decays."""
    dtype, (H, D), V = x.dtype, x.k.shape[2:], x.v.shape[3]
    q_TPQD = x.q.to(dtype) * x.scale
    shape = x.num_sequences, x.num_states, H, D, V
    state = x.q.new_zeros(shape, dtype=dtype) if x.initial_state is None else x.initial_state.to(dtype)
    return Operands(
        q_TPHGD=torch.unflatten(q_TPQD, 2, (H, q_TPQD.shape[2] // H)),
        k_TPHD=_mapped(x, x.k),
        v_TPHV=x.v.to(dtype),
        log_decay_THD=_log_decay(x, x.log_decay),
        write_strength_TH=None if x.write_strength is None else x.write_strength.to(dtype),
        router_logits_TN=x.router_logits,
        shared=None if x.shared is None else _shared_operands(x, x.shared),
        state_SMHDV=state,
        cu_seqlens=x.cu_seqlens.long(),
        one_token_each=x.one_token_each,
        top_k=x.top_k,
        write_gate=x.write_gate,
        read_gate=x.read_gate,
    )


def _shared_operands(x: Inputs, shared: SharedInputs) -> SharedOperands:
    q_TQD, H = shared.q.to(x.dtype) * x.scale, shared.k.shape[1]
    return SharedOperands(
        q_THGD=torch.unflatten(q_TQD, 1, (H, q_TQD.shape[1] // H)),
        k_THD=_mapped(x, shared.k),
        v_THV=shared.v.to(x.dtype),
        log_decay_THD=_log_decay(x, shared.log_decay),
        write_strength_TH=None if shared.write_strength is None else shared.write_strength.to(x.dtype),
    )


def _mapped(x: Inputs, k: Tensor) -> Tensor:
    """phi of keys [..., H, D]."""
    k = k.to(x.dtype)
    return key_feature_map(k if x.k_scale is None else k * x.k_scale.to(x.dtype)[:, None], x.k_map)


def _log_decay(x: Inputs, given: Tensor) -> Tensor:
    given = given.to(x.dtype)
    return given if x.decay_normalizer is None else F.logsigmoid(given) / x.decay_normalizer


def gather_rows(x_TP: Tensor, tokens: Tensor, partitions: Tensor) -> Tensor:
    """Rows [R..., ...] of x [T, P, ...] for pairs of token [R...] and partition [R...]; P = 1 shares one row."""
    T, P = x_TP.shape[:2]
    rows = tokens if P == 1 else tokens * P + partitions
    gathered = x_TP.reshape(T * P, *x_TP.shape[2:]).index_select(0, rows.flatten())
    return gathered.view(*rows.shape, *x_TP.shape[2:])


def slot_weights(x: Operands, routing: Routing) -> tuple[Tensor, Tensor]:
    """What scales the write and q in each used partition: e, or 1 without a gate.

    Returns:
        write and read weights [T, K], K as in `routing.used_TK`, with gradients to the gate.
    """
    gate_TK = routing.gate_TN.gather(1, routing.used_TK).to(x.q_TPHGD.dtype)
    plain_TK = torch.ones_like(gate_TK)
    return gate_TK if x.write_gate else plain_TK, gate_TK if x.read_gate else plain_TK


def written(k: Tensor, weight: Tensor, write_strength: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Keys and write strengths of slots under their write weights.

    Under the delta rule the weight multiplies the strength, not the key: keys have unit norm there, and a normalisation
    after the gate would cancel it (the published SSE over the gated delta rule has this fault, and its router gets no
    gradient). The transition I - weight * strength * k outer k also keeps a spectral norm of 1 or less.

    Args:
        k: [..., H, D].
        weight: [...], from `slot_weights`.
        write_strength: [..., H], or None for gated linear attention, whose keys are scaled.
    """
    if write_strength is None:
        return k * weight[..., None, None], None
    return k, write_strength * weight[..., None]
