"""Keys and values of a full window in any order: a new token takes the place of the oldest, and nothing else moves."""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""keys and values, each [B, H, columns, D]"""


class KeyRing:
    """The sinks of a window, then a ring of its columns. Softmax does not ask for their order.

    Args:
        sinks: of the window.
        recent: its last window - 1 columns, oldest first.
    """

    def __init__(self, sinks: Pair, recent: Pair) -> None:
        self.sinks = sinks[0].shape[2]
        self.window = recent[0].shape[2] + 1
        self._oldest = self.window - 1
        pairs = zip(sinks, recent, strict=True)
        self._whole = tuple(
            torch.cat([*pair, pair[1].new_empty(*pair[1].shape[:2], 1, pair[1].shape[3])], 2) for pair in pairs
        )

    def put(self, key: Tensor, value: Tensor) -> Pair:
        """Put one token [B, H, 1, D] in the place of the oldest; returns all, [B, H, sinks + window, D]."""
        keys, values = self._whole
        for whole, new in ((keys, key), (values, value)):
            whole.narrow(2, self.sinks + self._oldest, 1).copy_(new)
        self._oldest = (self._oldest + 1) % self.window
        return keys, values

    def stored(self) -> tuple[Pair, Pair]:
        """The sinks and all columns of the ring, as they lie."""
        (keys, values), cut = self._whole, self.sinks
        return (keys[:, :, :cut], values[:, :, :cut]), (keys[:, :, cut:], values[:, :, cut:])

    def in_order(self) -> tuple[Pair, Pair]:
        """The sinks and the last window - 1 columns, oldest first, as the ring was made of."""
        sinks, (keys, values) = self.stored()
        keys, values = (x.roll(-self._oldest, 2)[:, :, 1:] for x in (keys, values))
        return sinks, (keys, values)

    def is_writable(self) -> bool:
        """Whether tokens can be put here: tensors of inference mode are not changed outside of it."""
        return torch.is_inference_mode_enabled() or not self._whole[0].is_inference()
