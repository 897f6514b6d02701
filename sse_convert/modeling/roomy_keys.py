"""Keys and values of a softmax layer with room for more: on a CPU a step writes one column and copies no other."""

from typing import Any

import torch
from torch import Tensor

from sse_convert.modeling.compat import GrowingLayer

ROOM = 64
"""columns that are free after a copy"""


class RoomyLayer(GrowingLayer):
    """What transformers' `DynamicLayer` keeps, in the front of a larger tensor while single tokens come without
    gradients on a CPU. Where something else comes, or somebody replaced keys and values, it does as `DynamicLayer`."""

    _whole: Tensor | None = None
    """[2, B, H, columns, D] with keys and values in its front"""

    @property
    def free_bytes(self) -> int:
        """Of columns that hold nothing yet."""
        whole, length = self._whole, self.get_seq_length()
        if whole is None or self.keys.data_ptr() != whole.data_ptr():
            return 0
        return int(whole.nbytes // whole.shape[3] * (whole.shape[3] - length))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens [B, H, T, D]; returns all keys and values."""
        if not self._takes(key_states, value_states):
            self._whole = None
            kept: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return kept
        length = self.get_seq_length()
        if self._whole is None or not self._fits(self._whole, length):
            self._whole = self._roomy(length)
        torch.stack((key_states, value_states), out=self._whole.narrow(3, length, 1))
        self.keys, self.values = self._whole.narrow(3, 0, length + 1).unbind()
        return self.keys, self.values

    def _takes(self, key: Tensor, value: Tensor) -> bool:
        """Whether this is a token of each row after others, of which a column can be written."""
        plain = key.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        one = key.shape[-2] == 1 and key.shape == value.shape and key.dtype == value.dtype
        return plain and one and self.get_seq_length() > 0 and key.dtype == self.keys.dtype

    def _fits(self, whole: Tensor, length: int) -> bool:
        """Whether keys and values are the front of a tensor that has room and may be changed."""
        places = whole.data_ptr(), whole.data_ptr() + whole.stride(0) * whole.itemsize
        kept = self.keys, self.values
        front = tuple(x.data_ptr() for x in kept) == places and all(x.stride() == whole.stride()[1:] for x in kept)
        room = whole.shape[1] == len(self.keys) and whole.shape[3] > length
        return front and room and (torch.is_inference_mode_enabled() or not whole.is_inference())

    def _roomy(self, length: int) -> Tensor:
        """Keys and values with `ROOM` more columns."""
        rows, heads, _, dim = self.keys.shape
        whole = self.keys.new_empty(2, rows, heads, length + ROOM, dim)
        torch.stack((self.keys, self.values), out=whole.narrow(3, 0, length))
        return whole
