"""Which key-value heads of a layer see the whole row, as indices.

Which heads they are is data of a layer, not of its code: layers with as many of them share a compiled program.
"""

from typing import Any

import torch
from torch import Tensor


class HeadOrder:
    """Heads that see the whole row in front of the others.

    Args:
        full: key-value heads that see the whole row, ascending, at least one.
        of: key-value heads of the layer, more than those.
    """

    def __init__(self, full: tuple[int, ...], of: int) -> None:
        order = [*full, *(head for head in range(of) if head not in full)]
        self.full = len(full)
        # not a buffer: transformers leaves those that no checkpoint has empty
        self._order = torch.tensor([order, sorted(range(of), key=order.__getitem__)], device="cpu")

    def place(self, device: torch.device) -> None:
        """Keep the indices on a device, where compiled code finds them without copying."""
        if self._order.device != device:
            self._order = self._order.to(device)

    def apart(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """What of x belongs to the heads that see the whole row, and what to the others, each ascending.

        Args:
            x: any tensor with a dimension of heads, of each key-value head as many.
            dim: which dimension it is.
        """
        order, back = self._order.to(x.device)
        full = x.shape[dim] // len(order) * self.full
        made = _reordered(x, order, back, dim % x.dim())
        return made.narrow(dim, 0, full), made.narrow(dim, full, x.shape[dim] - full)

    def joined(self, full: Tensor, others: Tensor, dim: int) -> Tensor:
        """The whole of what `apart` took apart."""
        order, back = self._order.to(full.device)
        return _reordered(torch.cat([full, others], dim), back, order, dim % full.dim())


def head_order(full: tuple[int, ...], of: int) -> HeadOrder | None:
    """The order of a layer of `of` key-value heads; None where no head sees the whole row."""
    return HeadOrder(full, of) if full else None


def _reordered(x: Tensor, order: Tensor, back: Tensor, dim: int) -> Tensor:
    """x with the heads of a dimension in another order; `back` undoes it."""
    heads = x.reshape(*x.shape[:dim], len(order), x.shape[dim] // len(order), *x.shape[dim + 1 :])
    made: Tensor = _Reordered.apply(heads, order, back, dim)  # type: ignore[no-untyped-call]
    return made.flatten(dim, dim + 1)


class _Reordered(torch.autograd.Function):
    """x with its dimension of heads in another order. Backward reads, where that of `index_select` adds."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, *orders, ctx.dim = inputs
        ctx.save_for_backward(*orders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        order, back = ctx.saved_tensors
        return _Reordered.apply(grad, back, order, ctx.dim), None, None, None  # type: ignore[no-untyped-call]
