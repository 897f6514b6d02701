"""The decode step: a batch of sequences, one token each. Touches the selected partitions' states and no others."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sse_convert.kernels.torch.operands import Operands, gather_rows, slot_weights, written


def sse_attention_recurrent(x: Operands, *, inplace_state: bool = False) -> tuple[Tensor, Tensor]:
    """Advance all sequences together, one token at a time; made for one token per sequence, right for any lengths.

    Args:
        x: the operands; there is no device sync if cu_seqlens is on the CPU or all sequences have one token.
        inplace_state: write the new states into `x.state_SMHDV` and return it (no gradients).

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V].
    """
    wants_grad = x.wants_grad()
    state_SMHDV = x.state_SMHDV if wants_grad or inplace_state else x.state_SMHDV.clone()
    o_THGV = x.v_TPHV.new_zeros(x.num_tokens, *x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
    for sequences_B, tokens_B in _steps(x):
        o_BHGV, index, new_BKHDV = _step(x, state_SMHDV, sequences_B, tokens_B)
        put = state_SMHDV.index_put if wants_grad else state_SMHDV.index_put_
        state_SMHDV = put(index, new_BKHDV)
        o_THGV = o_THGV.index_copy(0, tokens_B, o_BHGV)
    return o_THGV, state_SMHDV


def _steps(x: Operands) -> Iterator[tuple[Tensor, Tensor]]:
    """For each token position, the sequences that have one there and those tokens."""
    device = x.router_logits_TN.device
    if x.one_token_each:
        every = torch.arange(x.num_sequences, device=device)
        yield every, every
        return
    starts_S, lengths_S = x.cu_seqlens[:-1].cpu(), x.cu_seqlens.diff().cpu()
    for position in range(int(lengths_S.max())):
        sequences_B = torch.nonzero(lengths_S > position)[:, 0]
        yield sequences_B.to(device), (starts_S[sequences_B] + position).to(device)


def _step(
    x: Operands, state_SMHDV: Tensor, sequences_B: Tensor, tokens_B: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Output [B, H, G, V] of one token per sequence; index and values of the states it writes."""
    N = x.num_partitions
    routing = x.route_rows(x.router_logits_TN[tokens_B])
    used_BK = routing.used_TK
    K = used_BK.shape[1]
    write_BK, read_BK = slot_weights(x, routing)
    token_BK = tokens_B[:, None].expand(-1, K)
    q_BKHGD = gather_rows(x.q_TPHGD, token_BK, used_BK) * read_BK[..., None, None, None]
    strength_B1H = None if x.write_strength_TH is None else x.write_strength_TH[tokens_B, None]
    k_BKHD, strength_BKH = written(gather_rows(x.k_TPHD, token_BK, used_BK), write_BK, strength_B1H)
    v_BKHV = gather_rows(x.v_TPHV, token_BK, used_BK)
    decay_BKHD = x.log_decay_THD[tokens_B].exp()[:, None].expand(-1, K, -1, -1)
    index_BK = used_BK
    if x.shared is not None:
        q_BKHGD = torch.cat([q_BKHGD, x.shared.q_THGD[tokens_B, None]], dim=1)
        k_BKHD = torch.cat([k_BKHD, x.shared.k_THD[tokens_B, None]], dim=1)
        v_BKHV = torch.cat([v_BKHV, x.shared.v_THV[tokens_B, None]], dim=1)
        decay_BKHD = torch.cat([decay_BKHD, x.shared.log_decay_THD[tokens_B, None].exp()], dim=1)
        index_BK = torch.cat([used_BK, torch.full_like(used_BK[:, :1], N)], dim=1)
        if strength_BKH is not None and x.shared.write_strength_TH is not None:
            strength_BKH = torch.cat([strength_BKH, x.shared.write_strength_TH[tokens_B, None]], dim=1)
    index = sequences_B[:, None], index_BK
    new_BKHDV = _update(state_SMHDV[index], decay_BKHD, k_BKHD, v_BKHV, strength_BKH)
    o_BHGV = (q_BKHGD @ new_BKHDV).sum(1)
    return o_BHGV, index, new_BKHDV


def _update(
    state_BKHDV: Tensor, decay_BKHD: Tensor, k_BKHD: Tensor, v_BKHV: Tensor, strength_BKH: Tensor | None
) -> Tensor:
    """The states after a decay and a write."""
    if strength_BKH is None:
        return torch.addcmul(k_BKHD[..., None] * v_BKHV[..., None, :], decay_BKHD[..., None], state_BKHDV)
    decayed_BKHDV = decay_BKHD[..., None] * state_BKHDV
    held_BKHV = (k_BKHD[..., None, :] @ decayed_BKHDV)[..., 0, :]
    correction_BKHV = strength_BKH[..., None] * (v_BKHV - held_BKHV)
    return torch.addcmul(decayed_BKHDV, k_BKHD[..., None], correction_BKHV[..., None, :])
