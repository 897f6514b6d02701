"""The paper's Algorithm 2: reorder tokens by (sequence, partition), then one variable-length linear attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from sse_convert.kernels.torch.chunk import gated_linear_attention
from sse_convert.kernels.torch.operands import Operands, gather_rows, slot_weights, written

LinearAttention = Callable[..., tuple[Tensor, Tensor]]
"""linear attention over packed segments, as `gated_linear_attention`"""


def sse_attention_varlen(x: Operands, *, attend: LinearAttention = gated_linear_attention) -> tuple[Tensor, Tensor]:
    """SSE as one call of linear attention over S * N segments, plus S for the shared partition.

    A slot is one (token, partition) pair. Slots are sorted by (sequence, partition), stably, so that each subsequence
    keeps the order of its tokens; the shared partition's slots are the tokens themselves, appended to the sequence.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V].
    """
    routing = x.route()
    (T, N), K, S = routing.gate_TN.shape, routing.used_TK.shape[1], x.num_sequences
    segment_R = (x.sequences()[:, None] * N + routing.used_TK).flatten()
    sorted_R, slot_R = torch.sort(segment_R, stable=True)
    token_R, partition_R = slot_R // K, routing.used_TK.flatten()[slot_R]
    write_R, read_R = (weight_TK.flatten()[slot_R] for weight_TK in slot_weights(x, routing))

    q_RHGD = gather_rows(x.q_TPHGD, token_R, partition_R) * read_R[:, None, None, None]
    strength_RH = None if x.write_strength_TH is None else x.write_strength_TH.index_select(0, token_R)
    k_RHD, strength_RH = written(gather_rows(x.k_TPHD, token_R, partition_R), write_R, strength_RH)
    v_RHV = gather_rows(x.v_TPHV, token_R, partition_R)
    log_decay_RHD = x.log_decay_THD.index_select(0, token_R)
    cu_slots = torch.searchsorted(sorted_R, torch.arange(S * N + 1, device=sorted_R.device))
    state_SHDV = x.state_SMHDV[:, :N].flatten(0, 1)
    if x.shared is not None:
        q_RHGD = torch.cat([q_RHGD, x.shared.q_THGD])
        k_RHD = torch.cat([k_RHD, x.shared.k_THD])
        v_RHV = torch.cat([v_RHV, x.shared.v_THV])
        log_decay_RHD = torch.cat([log_decay_RHD, x.shared.log_decay_THD])
        if strength_RH is not None and x.shared.write_strength_TH is not None:
            strength_RH = torch.cat([strength_RH, x.shared.write_strength_TH])
        cu_slots = torch.cat([cu_slots, T * K + x.cu_seqlens[1:].to(cu_slots.device)])
        state_SHDV = torch.cat([state_SHDV, x.state_SMHDV[:, N]])

    o_RHGV, final_SHDV = attend(
        q_RHGD, k_RHD, v_RHV, log_decay_RHD, cu_slots, state_SHDV, write_strength_TH=strength_RH
    )
    place_R = torch.empty_like(slot_R)
    place_R[slot_R] = torch.arange(T * K, device=slot_R.device)
    o_THGV = torch.unflatten(o_RHGV.index_select(0, place_R), 0, (T, K)).sum(1)
    final_SMHDV = torch.unflatten(final_SHDV[: S * N], 0, (S, N))
    if x.shared is not None:
        o_THGV = o_THGV + o_RHGV[T * K :]
        final_SMHDV = torch.cat([final_SMHDV, final_SHDV[S * N :, None]], dim=1)
    return o_THGV, final_SMHDV
