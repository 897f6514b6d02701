"""The definition of the SSE operator: one token at a time, in the words of the paper's equations."""

import torch
from torch import Tensor

from sse_convert.kernels.operands import Operands


def sse_attention_reference(x: Operands) -> tuple[Tensor, Tensor]:
    """For each token, in order: select partitions, decay and write those of the write set, then read the read set.

    Here q is already times the scale, k is phi(k_scale * k) over its head dim with phi the `k_map`, and log_decay is a
    natural log, made from gate logits x as logsigmoid(x) / decay_normalizer where those were given (`operands_of`, in
    the computing dtype; the same for q', k' and log_decay' of the shared partition). Then

        S[p] = exp(log_decay) * S[p] + (e[p] * k) outer v       p in the write set; other partitions stay as they are
        S[shared] = exp(log_decay') * S[shared] + k' outer v    always, ungated
        o = sum over p in the read set of (e[p] * q) S[p]  +  q' S[shared]

    A token reads its own write. Partitions that are read and not written are read as they stand, without decay.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V], in the dtype of the operands.

    Source: arXiv:2507.16577, section "SSE", equations eta_proj to state_output.
    """
    N, P = x.num_partitions, x.q_TPHGD.shape[1]
    routing = None if x.partition_gate is not None and x.partition_gate.needs_state else x.route()
    positions_T = x.positions()
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    for s, (start, end) in enumerate(x.spans()):
        states = list(x.state_SMHDV[s].unbind(0))
        for t in range(start, end):
            if routing is None:
                token = slice(t, t + 1)
                state_1NHDV = torch.stack(states[:N])[None]
                chosen, row = x.route_rows(x.router_logits_TN[token], positions_T[token], state_1NHDV), 0
            else:
                chosen, row = routing, t
            gate_N = chosen.gate_TN[row].to(x.q_TPHGD.dtype)
            decay_HD1 = x.log_decay_THD[t].exp()[..., None]
            out_HGV = x.v_TPHV.new_zeros(*x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
            for p in chosen.write_TK[row].tolist():
                k_HD, v_HV = x.k_TPHD[t, p % P], x.v_TPHV[t, p % P]
                weight = gate_N[p] if x.write_gate else 1.0
                states[p] = decay_HD1 * states[p] + (weight * k_HD)[..., None] * v_HV[:, None]
            for p in chosen.read_TK[row].tolist():
                weight = gate_N[p] if x.read_gate else 1.0
                out_HGV = out_HGV + (weight * x.q_TPHGD[t, p % P]) @ states[p]
            if x.shared is not None:
                k_HD, v_HV = x.shared.k_THD[t], x.shared.v_THV[t]
                states[N] = x.shared.log_decay_THD[t].exp()[..., None] * states[N] + k_HD[..., None] * v_HV[:, None]
                out_HGV = out_HGV + x.shared.q_THGD[t] @ states[N]
            outs.append(out_HGV)
        finals.append(torch.stack(states))
    o_THGV = torch.stack(outs) if outs else x.v_TPHV.new_zeros(0, *x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
    return o_THGV, torch.stack(finals) if finals else x.state_SMHDV
