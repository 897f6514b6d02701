"""What decoder layers gave for one set of kept layers: another set is computed from where it first differs.

A decoder layer gets what the layer before it gave, and nothing else that depends on which layers are kept. A test holds
every family to that.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

ROOM_ON_CPU = 2 << 30
"""bytes"""
ROOM = 4
"""one part in so many of a GPU's free memory"""

Pass = tuple[str, int]
"""name of the rows, number of the pass"""


class LayerOutputs:
    """Outputs of decoder layers, one set at a time; where memory is short, of every other layer, or fewer.

    Args:
        layers: the decoder layers, in order.
        layer_bytes: that the outputs of one layer take.
        device: of the model.
        span: 1 where layers are kept, else the factor in the numbers of heads.
    """

    def __init__(self, layers: Sequence[nn.Module], layer_bytes: int, device: torch.device, span: int = 1) -> None:
        self._layers, self._span = layers, span
        most = _room(device) // max(1, layer_bytes)
        every = -(-len(layers) // most) if most else len(layers) + 1
        self._stored_layers = range(every - 1, len(layers), every)
        self._stored: dict[Pass, dict[int, Any]] = {}
        self._kept: tuple[int, ...] | None = None

    def remember(self, kept: tuple[int, ...], names: Collection[str]) -> None:
        """From now on store what layers give for this set in the rows of these names, and nothing else."""
        known = self._stored if kept == self._kept else {}
        self._kept, self._stored = kept, {part: known[part] for part in known if part[0] in names}

    def has(self, part: Pass) -> bool:
        """Whether the outputs of a pass are here."""
        return part in self._stored

    @contextmanager
    def during(self, part: Pass, kept: tuple[int, ...]) -> Iterator[None]:
        """While one pass of the model runs with these layers kept."""
        with ExitStack() as held:
            if kept == self._kept and not self.has(part):
                held.enter_context(self._recording(part))
            elif self._kept is not None:
                differing = min(set(kept) ^ set(self._kept), default=len(self._layers) * self._span) // self._span
                held.enter_context(self._beginning_at(differing, self._stored.get(part, {})))
            yield

    @contextmanager
    def _recording(self, part: Pass) -> Iterator[None]:
        found: dict[int, Any] = {}
        with ExitStack() as held:
            for i in self._stored_layers:
                hook = self._layers[i].register_forward_hook(lambda _, __, output, i=i: found.update({i: output}))
                held.callback(hook.remove)
            yield
        self._stored[part] = found

    @contextmanager
    def _beginning_at(self, differing: int, stored: dict[int, Any]) -> Iterator[None]:
        """Layers up to the last stored one before `differing` give what it gave."""
        last = max((i for i in stored if i < differing), default=-1)
        with ExitStack() as held:
            for layer in self._layers[: last + 1]:
                layer.forward = lambda *_, **__: stored[last]
                held.callback(layer.__dict__.pop, "forward")
            yield


def _room(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] // ROOM if device.type == "cuda" else ROOM_ON_CPU
