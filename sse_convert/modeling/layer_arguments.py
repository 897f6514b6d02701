"""What a converted model's backbone hands its layers, beyond what the family's own hands on: made once per forward."""

from typing import Any

from torch import nn

from sse_convert.modeling.context import Shard
from sse_convert.modeling.layout import LAYOUT, sequence_layout
from sse_convert.modeling.window.sliding import MASKS, sliding_masks

PADDING = "sse_padding"
"""keyword argument of a backbone that is handed masks: the padding mask [B, past + T] they were made of, or None"""
OFFSETS = "sse_offsets"
"""keyword argument of the model: int64 [S + 1], where documents begin in the flattened batch, as for `document_layout`;
beside `position_ids` that restart it saves looking at them, for which one would wait for the device"""


class HandOn:
    """Hands what converted layers need from a decoder layer to its attention, where the family's own code does not.

    An object whose methods are hooks, so that models can be pickled.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.words: dict[str, Any] = {}
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def reach(self, attention: nn.Module) -> None:
        """Give the arguments to this module; before its other hooks are registered."""
        attention.register_forward_pre_hook(self._give, with_kwargs=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.words = {name: kwargs[name] for name in (LAYOUT, MASKS) if name in kwargs}

    def _give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        words, self.words = self.words, {}
        return args, {**kwargs, **words}


def split_arguments(shard: Shard, windows: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """The keyword arguments that converted layers need where rows are split: of whole rows.

    Args:
        shard: how they are split.
        windows: index of each layer with a window -> (window, sinks).
    """
    shape, starts, device = shard.shape, shard.starts, shard.positions.device
    layout = sequence_layout(shape, device, starts=starts, offsets=shard.offsets)
    return {LAYOUT: layout, MASKS: sliding_masks(windows, None, None, None, starts, shape, device)}
