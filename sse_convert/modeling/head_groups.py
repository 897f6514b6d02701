"""Layers some of whose heads see the whole row: taking heads apart and putting them together again.

Heads are named by their key-value head; the query heads that read it go with it. A dimension of heads has as many
entries for each key-value head, whether it counts key-value heads, query heads, or what projections make of them.
"""

import torch
from torch import Tensor


def other_heads(heads: tuple[int, ...], of: int) -> tuple[int, ...]:
    """The key-value heads among `of` that are not named, ascending."""
    return tuple(head for head in range(of) if head not in heads)


def take_heads(x: Tensor, heads: tuple[int, ...], of: int, dim: int) -> Tensor:
    """What of x belongs to some heads.

    Args:
        x: any tensor with a dimension of heads.
        heads: key-value heads, ascending.
        of: how many key-value heads that dimension covers.
        dim: which dimension it is.
    """
    each = x.shape[dim] // of
    parts = [x.narrow(dim, first * each, count * each) for first, count in _runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join_heads(named: Tensor, others: Tensor, heads: tuple[int, ...], dim: int) -> Tensor:
    """The whole of what `take_heads` took apart.

    Args:
        named: what belongs to `heads`.
        others: what belongs to the other heads.
        heads: key-value heads, ascending, at least one.
        dim: the dimension of heads.
    """
    each = named.shape[dim] // len(heads)
    of = len(heads) + others.shape[dim] // each
    first = {head: named.narrow(dim, i * each, each) for i, head in enumerate(heads)}
    rest = {head: others.narrow(dim, i * each, each) for i, head in enumerate(other_heads(heads, of))}
    return torch.cat([(first | rest)[head] for head in range(of)], dim)


def _runs(heads: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and number of heads of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and sum(runs[-1]) == head:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((head, 1))
    return runs
