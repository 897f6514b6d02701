"""The gated delta rule on the chunks of a slab: what a token writes is corrected by all earlier writes of its chunk.

Each token writes u_t = beta_t (v_t - k_t S), with S the state after the token's decay, in place of v_t. Inside a chunk
the u are the solution of a unit lower triangular system (the WY or UT transform, arXiv:2406.06484, section 3),

    (I + diag(beta) A) U = diag(beta) (V - K S_0)    A_ij = k_i k_j under the decay between them, for j < i

with K decayed from the chunk's start. Keys take part as one more query per token, so that `chunk_intra.py` gives A, and
nothing overflows however strong the decay. With U in place of V the rest is gated linear attention.
"""

import torch
from torch import Tensor

from sse_convert.kernels.torch.chunk_intra import Gradients, decay_tree, grouped, within_chunks, within_chunks_backward
from sse_convert.kernels.torch.chunk_layout import Slab


def delta_rule(
    slab: Slab, state: Tensor, q_ECGD: Tensor, k_ECD: Tensor, v_ECV: Tensor, log_decay_ECD: Tensor, beta_EC: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [E, C, G, V] and the states before each chunk [E, D, V]; `state` becomes the states after the slab."""
    G, tree = q_ECGD.shape[2], decay_tree(log_decay_ECD.exp())
    read_EXC, key_ECC, q_start_EXD, k_start_ECD, k_end_ECD = _decayed(q_ECGD, k_ECD, tree)
    u_ECV, w_ECD = _solve(key_ECC, beta_EC, v_ECV, k_start_ECD)
    before_EDV = v_ECV.new_empty(len(v_ECV), k_ECD.shape[2], v_ECV.shape[2])
    for before, u, w, k_end, decay in slab.steps(before_EDV, u_ECV, w_ECD, k_end_ECD, tree[-1].mT):
        before.copy_(state[: len(before)])
        u -= w @ before
        torch.addcmul(k_end.mT @ u, decay, before, out=state[: len(before)])
    return grouped(torch.bmm(read_EXC, u_ECV).baddbmm_(q_start_EXD, before_EDV), G), before_EDV


def delta_rule_backward(
    slab: Slab,
    d_state: Tensor,
    before_EDV: Tensor,
    d_out_ECGV: Tensor,
    q_ECGD: Tensor,
    k_ECD: Tensor,
    v_ECV: Tensor,
    log_decay_ECD: Tensor,
    beta_EC: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay and beta; d_state becomes the gradient of the states before the slab."""
    G, tree = q_ECGD.shape[2], decay_tree(log_decay_ECD.exp())
    read_EXC, key_ECC, q_start_EXD, k_start_ECD, k_end_ECD = _decayed(q_ECGD, k_ECD, tree)
    u_ECV, w_ECD = _solve(key_ECC, beta_EC, v_ECV, k_start_ECD)
    u_ECV -= w_ECD @ before_EDV
    d_out_EXV = d_out_ECGV.flatten(1, 2)

    d_u_ECV = read_EXC.mT @ d_out_EXV
    d_after_EDV = torch.empty_like(before_EDV)
    d_before_EDV = q_start_EXD.mT @ d_out_EXV - w_ECD.mT @ d_u_ECV
    steps = slab.steps(d_after_EDV, d_before_EDV, w_ECD, k_end_ECD, tree[-1].mT)
    for d_after, d_before, w, k_end, decay in reversed(steps):
        d_after.copy_(d_state[: len(d_after)])
        torch.addcmul(d_before - w.mT @ (k_end @ d_after), decay, d_after, out=d_state[: len(d_after)])
    d_u_ECV += k_end_ECD @ d_after_EDV

    d_right_ECV = torch.linalg.solve_triangular(
        (beta_EC[..., None] * key_ECC).mT, d_u_ECV, upper=True, unitriangular=True
    )
    d_system_ECC = -(d_right_ECV @ u_ECV.mT).tril(-1)
    d_v_ECV = beta_EC[..., None] * d_right_ECV
    d_beta_EC = (d_system_ECC * key_ECC).sum(-1) + (d_right_ECV * (v_ECV - k_start_ECD @ before_EDV)).sum(-1)
    d_scores = _with_keys(d_out_EXV @ u_ECV.mT, beta_EC[..., None] * d_system_ECC, G)
    d_start = _with_keys(d_out_EXV @ before_EDV.mT, -d_v_ECV @ before_EDV.mT, G)

    rows_EXD = _with_keys(q_ECGD.flatten(1, 2), k_ECD, G)
    gradients = Gradients(torch.zeros_like(rows_EXD), torch.zeros_like(k_ECD), torch.zeros_like(k_ECD))
    _, from_start_ECD, to_end_ECD = within_chunks_backward(rows_EXD, k_ECD, tree, d_scores, gradients)
    gradients.add_reads(_with_keys(q_start_EXD, k_start_ECD, G), d_start, from_start_ECD)
    gradients.add_writes(k_end_ECD, u_ECV @ d_after_EDV.mT, to_end_ECD)
    gradients.log_decay.add_((d_after_EDV * before_EDV).sum(-1)[:, None] * tree[-1])
    d_q_ECGD, d_k_EC1D = torch.split(grouped(gradients.q, G + 1), [G, 1], dim=2)
    return d_q_ECGD, gradients.k + d_k_EC1D[:, :, 0], d_v_ECV, gradients.log_decay, d_beta_EC


def _with_keys(rows_EX: Tensor, keys_EC: Tensor, G: int) -> Tensor:
    """[E, C * (G + 1), ...]: the G query rows [E, C * G, ...] of each token, then its row of keys [E, C, ...]."""
    return torch.cat([grouped(rows_EX, G), keys_EC[:, :, None]], dim=2).flatten(1, 2)


def _decayed(q_ECGD: Tensor, k_ECD: Tensor, tree: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores of queries [E, C * G, C] and of keys [E, C, C], both decayed from the chunk's start, keys to its end."""
    G, k_end_ECD = q_ECGD.shape[2], k_ECD.clone()
    rows_EXD = _with_keys(q_ECGD.flatten(1, 2), k_ECD, G)
    scores_EXC = within_chunks(rows_EXD, k_end_ECD, tree)
    read, key = torch.split(grouped(scores_EXC, G + 1), [G, 1], dim=2)
    q_start, k_start = torch.split(grouped(rows_EXD, G + 1), [G, 1], dim=2)
    return read.flatten(1, 2), key[:, :, 0], q_start.flatten(1, 2), k_start[:, :, 0], k_end_ECD


def _solve(key_ECC: Tensor, beta_EC: Tensor, v_ECV: Tensor, k_start_ECD: Tensor) -> tuple[Tensor, Tensor]:
    """U for states of zero [E, C, V], and W [E, C, D]: U is less by W times the state before the chunk."""
    right = beta_EC[..., None] * torch.cat([v_ECV, k_start_ECD], dim=2)
    system_ECC = beta_EC[..., None] * key_ECC  # the diagonal is taken as 1, what is above it as 0
    solved = torch.linalg.solve_triangular(system_ECC, right, upper=False, unitriangular=True)
    u_ECV, w_ECD = torch.split(solved, [v_ECV.shape[2], k_start_ECD.shape[2]], dim=2)
    return u_ECV.contiguous(), w_ECD.contiguous()
