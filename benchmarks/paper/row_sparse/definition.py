"""The mixers' recurrences, one token and one row at a time: what the fast operators must equal.

Shapes here: q, k [T, D], v [T, V], one sequence and one head.
"""

import torch
from torch import Tensor

from benchmarks.paper.row_sparse.update import RowSparse


def gated_linear_attention_steps(
    q_TD: Tensor, k_TD: Tensor, v_TV: Tensor, log_decay_TD: Tensor, update: RowSparse | None
) -> Tensor:
    """S^i = a^i S^i + k^i v for the rows i that the token selects; the others stay (or decay only);  o = q S.

    Returns:
        [T, V].
    """
    state_DV = v_TV.new_zeros(k_TD.shape[1], v_TV.shape[1])
    outs = []
    for q_D, k_D, v_V, log_decay_D in zip(q_TD, k_TD, v_TV, log_decay_TD, strict=True):
        state_DV = _updated(state_DV, k_D, v_V, log_decay_D, update)
        outs.append(q_D @ state_DV)
    return torch.stack(outs)


def gated_slot_attention_steps(
    q_TK: Tensor, k_TK: Tensor, v_TV: Tensor, write_TD: Tensor, log_decay_TD: Tensor, update: RowSparse | None
) -> Tensor:
    """Two states of D slots, one of keys and one of values, both updated with the write strengths of the token.

    K^i = a^i K^i + s^i k;  V^i = a^i V^i + s^i v  for the slots i that the token selects;  o = softmax(K q) V.

    Returns:
        [T, V].

    Source: arXiv:2409.07146, section "Gated Slot Attention".
    """
    keys_DK = k_TK.new_zeros(write_TD.shape[1], k_TK.shape[1])
    values_DV = v_TV.new_zeros(write_TD.shape[1], v_TV.shape[1])
    outs = []
    for q_K, k_K, v_V, write_D, log_decay_D in zip(q_TK, k_TK, v_TV, write_TD, log_decay_TD, strict=True):
        keys_DK = _updated(keys_DK, write_D, k_K, log_decay_D, update)
        values_DV = _updated(values_DV, write_D, v_V, log_decay_D, update)
        outs.append(torch.softmax(keys_DK @ q_K, 0) @ values_DV)
    return torch.stack(outs)


def _updated(state_DV: Tensor, k_D: Tensor, v_V: Tensor, log_decay_D: Tensor, update: RowSparse | None) -> Tensor:
    """The state after one token, row by row."""
    entries = k_D.tolist()
    order = sorted(range(len(entries)), key=lambda i: -entries[i])
    selected = set(order if update is None else order[: update.rows])
    rows = []
    for i, row_V in enumerate(state_DV):
        if i in selected:
            rows.append(log_decay_D[i].exp() * row_V + k_D[i] * v_V)
        elif update is not None and update.decay == "all":
            rows.append(log_decay_D[i].exp() * row_V)
        else:
            rows.append(row_V)
    return torch.stack(rows)
