"""The keys and values of a window layer as the kernel of one-token steps has them, while its cache is fixed.

Shape letters: B rows, H heads, S sinks, W window, D head dim.
"""

import torch
from torch import Tensor

from sse_convert.modeling.window_cache import Pair


class TokenRing:
    """The sinks, then a ring of the window's columns: position p >= S is in column S + (p - S) % W.

    Args:
        sinks: keys and values of positions 0 to S - 1, each [B, H, S, D].
        recent: those of the last W - 1 positions, oldest first; what stands for positions below 0 is never seen.
        seen: int64, 0-d, on the device: tokens so far, which others count.
    """

    def __init__(self, sinks: Pair, recent: Pair, seen: Tensor) -> None:
        batch, heads, self._sinks, dim = sinks[0].shape
        self._window, self._seen = recent[0].shape[2] + 1, seen
        self.rows = sinks[0].new_zeros(batch, 2, self._sinks + self._window, heads, dim)
        """[B, 2, S + W, H, D]"""
        self.slots = torch.arange(batch, device=seen.device)
        self.rows[:, :, : self._sinks] = torch.stack(sinks, 1).transpose(2, 3)
        self.rows.index_copy_(2, self._columns(), torch.stack(recent, 1).transpose(2, 3))

    def stored(self) -> tuple[Pair, Pair]:
        """The sinks and all columns of the ring, as they lie."""
        keys, values = self.rows.transpose(2, 3).unbind(1)
        cut = self._sinks
        return (keys[:, :, :cut], values[:, :, :cut]), (keys[:, :, cut:], values[:, :, cut:])

    def in_order(self) -> tuple[Pair, Pair]:
        """The sinks and the last W - 1 columns, oldest first, as the ring was made of."""
        sinks, _ = self.stored()
        keys, values = self.rows.index_select(2, self._columns()).transpose(2, 3).unbind(1)
        return sinks, (keys, values)

    def is_writable(self) -> bool:
        """Whether tokens can be put here: tensors of inference mode are not changed outside of it."""
        return torch.is_inference_mode_enabled() or not self.rows.is_inference()

    def _columns(self) -> Tensor:
        """Of the last W - 1 positions, oldest first."""
        position = self._seen + torch.arange(1 - self._window, 0, device=self._seen.device)
        in_ring = self._sinks + (position - self._sinks) % self._window
        return torch.where((position >= 0) & (position < self._sinks), position, in_ring)
