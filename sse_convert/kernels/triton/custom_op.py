"""What torch operators of the kernels have in common: they pass tensors only, and gradients arrive slot by slot."""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.triton.chunk import Forward, sum_slots
from sse_convert.kernels.triton.routing import SlotLayout

_SAVED = tuple(field.name for field in dc.fields(Forward) if field.name != "final")
TABLES = tuple(field.name for field in dc.fields(SlotLayout) if field.name != "num_shared_chunks")
"""tensors of a layout, by name"""
LEAST = 1e-20
"""weights nearer to zero count as this, so that their gradients may be divided by them"""


def tables_of(layout: SlotLayout) -> list[Tensor]:
    """A layout's tensors in the order of `TABLES`."""
    return [getattr(layout, name) for name in TABLES]


def layout_of(tables: list[Tensor], num_shared_chunks: int) -> SlotLayout:
    """The layout of such tensors."""
    return SlotLayout(**dict(zip(TABLES, tables, strict=True)), num_shared_chunks=num_shared_chunks)


def to_save(done: Forward | None, like: Tensor) -> list[Tensor]:
    """What the backward pass needs of a forward pass; nothing if none may follow."""
    return [] if done is None else [or_empty(getattr(done, name), like) for name in _SAVED]


def saved_forward(saved: list[Tensor]) -> Forward:
    """The forward pass that `to_save` took apart, without its final state."""
    held: dict[str, Any] = {n: tensor if tensor.numel() else None for n, tensor in zip(_SAVED, saved, strict=True)}
    return Forward(final=None, **held)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """x, or what stands for None among the results of an operator."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def away_from_zero(weight: Tensor) -> Tensor:
    """The weights with those next to zero moved to `LEAST`; their gradients stay as they are."""
    given = weight.detach()
    return weight + torch.where(given.abs() < LEAST, LEAST - given, 0.0)


def by_partition(slots: Tensor, used: Tensor, like: Tensor) -> Tensor:
    """Gradient [T, P, ...] from slots [K, T, ...]; zeros for partitions that a token does not use."""
    if like.shape[1] == 1:
        return sum_slots(slots)[:, None]
    tokens = torch.arange(like.shape[0], device=like.device)[:, None]
    return torch.zeros_like(like).index_put((tokens, used.long()), slots.transpose(0, 1))
