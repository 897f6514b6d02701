"""The definition of the SSE operator: one token at a time, in the words of the paper's equations."""

import torch
from torch import Tensor

from sse_convert.kernels.torch.operands import Operands


def sse_attention_reference(x: Operands) -> tuple[Tensor, Tensor]:
    """For each token, in order: select partitions, decay and write them, then read them.

    Here q is already times the scale, k is phi(k_scale * k) over its head dim with phi the `k_map`, and log_decay is a
    natural log, made from gate logits x as logsigmoid(x) / decay_normalizer where those were given (`operands_of`, in
    the computing dtype; the same for q', k' and log_decay' of the shared partition). Then

        S[p] = exp(log_decay) * S[p] + (e[p] * k) outer v       p selected; other partitions stay as they are
        S[shared] = exp(log_decay') * S[shared] + k' outer v    always, ungated
        o = sum over p selected of (e[p] * q) S[p]  +  q' S[shared]

    Under the gated delta rule (a write_strength is given) a token first reads, with its key, what the decayed state
    holds, and writes the difference:

        S[p] = exp(log_decay) * S[p];   S[p] = S[p] + e[p] * write_strength * k outer (v - k S[p])

    and the same, without e and with its own strength, for the shared partition: with a decay per head Gated DeltaNet's
    equation, with one per channel that of Kimi Linear (decay, then correct). The gate scales the strength and not the
    key; `operands.written` says why.

    A token reads its own write.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V], in the dtype of the operands.

    Source: arXiv:2507.16577, section "SSE", equations eta_proj to state_output.
    """
    N, P, KP, VP = x.num_partitions, x.q_TPHGD.shape[1], x.k_TPHD.shape[1], x.v_TPHV.shape[1]
    chosen = x.route()
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    for s, (start, end) in enumerate(x.spans()):
        states = list(x.state_SMHDV[s].unbind(0))
        for t in range(start, end):
            gate_N = chosen.gate_TN[t].to(x.q_TPHGD.dtype)
            decay_HD1 = x.log_decay_THD[t].exp()[..., None]
            out_HGV = x.v_TPHV.new_zeros(*x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
            strength_H = None if x.write_strength_TH is None else x.write_strength_TH[t]
            used_K = chosen.used_TK[t]
            write_N, read_N = (gate_N if gated else torch.ones_like(gate_N) for gated in (x.write_gate, x.read_gate))
            for p in used_K.tolist():
                k_HD, v_HV = x.k_TPHD[t, p % KP], x.v_TPHV[t, p % VP]
                states[p] = _update(decay_HD1 * states[p], k_HD, v_HV, write_N[p], strength_H)
                out_HGV = out_HGV + (read_N[p] * x.q_TPHGD[t, p % P]) @ states[p]
            if x.shared is not None:
                k_HD, v_HV, strength_TH = x.shared.k_THD[t], x.shared.v_THV[t], x.shared.write_strength_TH
                strength_H = None if strength_TH is None else strength_TH[t]
                decayed_HDV = x.shared.log_decay_THD[t].exp()[..., None] * states[N]
                states[N] = _update(decayed_HDV, k_HD, v_HV, gate_N.new_ones(()), strength_H)
                out_HGV = out_HGV + x.shared.q_THGD[t] @ states[N]
            outs.append(out_HGV)
        finals.append(torch.stack(states))
    o_THGV = torch.stack(outs) if outs else x.v_TPHV.new_zeros(0, *x.q_TPHGD.shape[2:4], x.v_TPHV.shape[-1])
    return o_THGV, torch.stack(finals) if finals else x.state_SMHDV


def _update(state_HDV: Tensor, k_HD: Tensor, v_HV: Tensor, weight: Tensor, strength_H: Tensor | None) -> Tensor:
    """A decayed state after a write."""
    if strength_H is None:
        return state_HDV + (weight * k_HD)[..., None] * v_HV[:, None]
    held_HV = (k_HD[:, None] @ state_HDV)[:, 0]
    return state_HDV + k_HD[..., None] * ((weight * strength_H)[:, None] * (v_HV - held_HV))[:, None]
