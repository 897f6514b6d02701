"""A for-loop over partitions, one call of linear attention on the tokens of each: simple, and slow in N."""

import torch
from torch import Tensor

from sse_convert.kernels.torch.chunk import CHUNK_SIZE, gated_linear_attention
from sse_convert.kernels.torch.operands import Operands, gather_rows, slot_weights, written


def sse_attention_sequential(x: Operands, *, chunk_size: int = CHUNK_SIZE) -> tuple[Tensor, Tensor]:
    """SSE partition by partition, the paper's baseline implementation.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V].
    """
    routing = x.route()
    write_TK, read_TK = slot_weights(x, routing)
    sequence_T = x.sequences()
    o_THGV = x.v_TPHV.new_zeros(len(sequence_T), *x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
    finals = []
    for p in range(x.num_partitions):
        token_R, slot_R = torch.nonzero(routing.used_TK == p, as_tuple=True)
        lengths = torch.bincount(sequence_T[token_R], minlength=x.num_sequences)
        cu_slots = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        partition_R = torch.full_like(token_R, p)
        k_RHD, strength_RH = written(
            gather_rows(x.k_TPHD, token_R, partition_R),
            write_TK[token_R, slot_R],
            None if x.write_strength_TH is None else x.write_strength_TH[token_R],
        )
        o_RHGV, final_SHDV = gated_linear_attention(
            gather_rows(x.q_TPHGD, token_R, partition_R) * read_TK[token_R, slot_R][:, None, None, None],
            k_RHD,
            gather_rows(x.v_TPHV, token_R, partition_R),
            x.log_decay_THD[token_R],
            cu_slots,
            x.state_SMHDV[:, p],
            write_strength_TH=strength_RH,
            chunk_size=chunk_size,
        )
        o_THGV = o_THGV.index_add(0, token_R, o_RHGV)
        finals.append(final_SHDV)
    if x.shared is not None:
        s = x.shared
        o_shared_THGV, final_SHDV = gated_linear_attention(
            s.q_THGD, s.k_THD, s.v_THV, s.log_decay_THD, x.cu_seqlens, x.state_SMHDV[:, -1],
            write_strength_TH=s.write_strength_TH, chunk_size=chunk_size,
        )  # fmt: skip
        o_THGV = o_THGV + o_shared_THGV
        finals.append(final_SHDV)
    return o_THGV, torch.stack(finals, dim=1)
