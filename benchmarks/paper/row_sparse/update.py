"""Which rows a token updates, and the loss that spreads tokens over rows."""

import dataclasses as dc
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.feature_maps import KeyFeatureMap, key_feature_map, selected_rows

RowDecay = Literal["selected", "all"]


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class RowSparse:
    """A row-sparse update of each head's state."""

    rows: int
    """k, rows that a token updates: those with the largest key entries"""
    decay: RowDecay = "selected"
    """rows that decay: those the token updates (Appendix A), or all of them (section 3, equation of the update)"""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UsageError(f"a row-sparse update of {self.rows} rows", expected="at least 1")
        if self.decay not in get_args(RowDecay):
            raise UsageError(f"row decay is {self.decay!r}", expected=f"one of {', '.join(get_args(RowDecay))}")


Updates = Sequence[RowSparse | None]
"""how each of the R models updates its states; None is dense: every token updates every row"""


def apply_updates(
    k: Tensor, log_decay: Tensor, updates: Updates, k_map: KeyFeatureMap = "identity"
) -> tuple[Tensor, Tensor]:
    """Mapped keys and log decays with 0 in the rows that a token spares: no write, no decay.

    Args:
        k: [R, ..., D] keys before the map; the largest entries select, ties go to the lowest row.
        log_decay: [R, ..., D], natural log, <= 0.
        updates: one per model.
        k_map: as in `sse_attention`; softmax runs over the selected rows alone.

    Raises:
        ShapeError: there are not as many updates as models.
    """
    _check(k, updates)
    written, decayed = [], []
    for update, part in _groups(k.detach(), updates):
        everything = torch.ones_like(part, dtype=torch.bool)
        own = everything if update is None else selected_rows(part, update.rows)
        written.append(own)
        decayed.append(own if update is None or update.decay == "selected" else everything)
    spared = ~torch.cat(written)
    if k_map == "softmax":
        k = key_feature_map(k.masked_fill(spared, float("-inf")), "softmax")
    else:
        k = key_feature_map(k, k_map).masked_fill(spared, 0)
    return k, log_decay.masked_fill(~torch.cat(decayed), 0)


def row_balance_loss(k: Tensor, updates: Updates) -> Tensor:
    """c/k sum_i f_i p_i of each model: 1 when tokens use all rows equally, c/k when all use the same k rows.

    c is the number of rows, f_i the share of tokens that select row i, p_i the mean of softmax(top-k(key)) in row i, by
    head; the mean over heads is returned. Only p_i carries a gradient, so a row that no token selects stays unused.

    Args:
        k: [R, ..., H, D] keys before the map.
        updates: one per model; a dense model has nothing to balance.

    Returns:
        [R], 0 for dense models.

    Raises:
        ShapeError: there are not as many updates as models.

    Source: arXiv:2507.16577, section 3, L_balance without its coefficient.
    """
    _check(k, updates)
    losses, c = [], k.shape[-1]
    for update, part in _groups(k.flatten(1, -3), updates):
        if update is None:
            losses.append(part.new_zeros(len(part)))
            continue
        selected = selected_rows(part.detach(), update.rows)
        share_RHD = selected.to(part.dtype).mean(1)
        weight_RHD = key_feature_map(part, "softmax", update.rows).mean(1)
        losses.append(c / min(update.rows, c) * (share_RHD * weight_RHD).sum(-1).mean(-1))
    return torch.cat(losses)


def _groups(x: Tensor, updates: Updates) -> Iterator[tuple[RowSparse | None, Tensor]]:
    """Neighbouring models with the same update, and their part of x [R, ...]."""
    runs = [(update, len(list(group))) for update, group in groupby(updates)]
    return zip([update for update, _ in runs], torch.split(x, [size for _, size in runs]), strict=True)


def _check(k: Tensor, updates: Updates) -> None:
    if len(updates) != k.shape[0]:
        raise ShapeError(f"{len(updates)} updates for {k.shape[0]} models", expected="one per model")
