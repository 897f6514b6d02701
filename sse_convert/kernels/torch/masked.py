"""The paper's Algorithm 1, completed to the equations: every partition sees every token, masked by the routing."""

import torch
from torch import Tensor

from sse_convert.kernels.torch.chunk import CHUNK_SIZE, gated_linear_attention
from sse_convert.kernels.torch.operands import Operands, slot_weights, written


def sse_attention_masked(x: Operands, *, chunk_size: int = CHUNK_SIZE) -> tuple[Tensor, Tensor]:
    """SSE as gated linear attention with N times the heads, plus H for the shared partition.

    For a token that does not use a partition, keys (under the delta rule, write strengths), values and queries are zero
    and the log-decay is 0, which leaves the state as it is. The outputs of the partitions are summed.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V].
    """
    routing = x.route()
    H = x.log_decay_THD.shape[1]
    written_TN = torch.zeros_like(routing.gate_TN, dtype=torch.bool).scatter(1, routing.used_TK, True)
    none_TN = x.q_TPHGD.new_zeros(written_TN.shape)
    write_TN, read_TN = (none_TN.scatter(1, routing.used_TK, weight_TK) for weight_TK in slot_weights(x, routing))

    q_TXGD = (x.q_TPHGD * read_TN[..., None, None, None]).flatten(1, 2)
    strength_T1H = None if x.write_strength_TH is None else x.write_strength_TH[:, None]
    k_TNHD, strength_TNH = written(x.k_TPHD, write_TN, strength_T1H)
    k_TXD = k_TNHD.expand(-1, x.num_partitions, -1, -1).flatten(1, 2)
    strength_TX = None if strength_TNH is None else strength_TNH.flatten(1, 2)
    v_TXV = (x.v_TPHV * written_TN[..., None, None]).flatten(1, 2)
    log_decay_TXD = x.log_decay_THD[:, None].where(written_TN[..., None, None], 0.0).flatten(1, 2)
    if x.shared is not None:
        q_TXGD = torch.cat([q_TXGD, x.shared.q_THGD], dim=1)
        k_TXD = torch.cat([k_TXD, x.shared.k_THD], dim=1)
        v_TXV = torch.cat([v_TXV, x.shared.v_THV], dim=1)
        log_decay_TXD = torch.cat([log_decay_TXD, x.shared.log_decay_THD], dim=1)
        if strength_TX is not None and x.shared.write_strength_TH is not None:
            strength_TX = torch.cat([strength_TX, x.shared.write_strength_TH], dim=1)
    o_TXGV, final_SXDV = gated_linear_attention(
        q_TXGD, k_TXD, v_TXV, log_decay_TXD, x.cu_seqlens, x.state_SMHDV.flatten(1, 2),
        write_strength_TH=strength_TX, chunk_size=chunk_size,
    )  # fmt: skip
    partitions = x.state_SMHDV.shape[1]
    heads = (partitions, H)
    return torch.unflatten(o_TXGV, 1, heads).sum(1), torch.unflatten(final_SXDV, 1, heads)
