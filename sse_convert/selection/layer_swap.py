"""Stand-ins for attention layers, swapped into one model in place: the teacher's modules stay where they are.

Rows are one document each, without padding and without a cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.mixers import SlidingMixer
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.window.sliding import attention_mask_for, training_sees
from sse_convert.modeling.window.window_attention import ByHeads, HeadOrder, Sees, use_window_attention

Forward = Callable[..., tuple[Any, ...]]
"""what a decoder layer calls: (output [B, T, hidden], weights or None, ...)"""


class Window:
    """A layer's own softmax attention, limited to a window with sinks.

    Args:
        softmax: the attention's forward.
        mask: of the window.
        order: which key-value heads see the whole row all the same; None for none.
    """

    def __init__(self, softmax: Forward, mask: "WindowMask", order: HeadOrder | None = None) -> None:
        self.softmax = softmax
        self.mask = mask
        self.order = order

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As the layer's attention, whatever mask it was given."""
        hidden = _hidden(args, kwargs)
        sees = self.mask((hidden.shape[0], hidden.shape[1]))
        whole = kwargs.get("attention_mask")
        kwargs["attention_mask"] = ByHeads(self.order, whole, sees, None) if self.order else sees
        return self.softmax(*args, **kwargs)

    def keeping(self, order: HeadOrder) -> "Window":
        """The same but for some heads, which see the whole row."""
        return Window(self.softmax, self.mask, order)


class WindowMask:
    """The mask of one document per row, in the form the model's attention takes; one for all layers."""

    def __init__(self, model: PreTrainedModel, mixer: SlidingMixer) -> None:
        self.model = model
        self.mixer = mixer
        self._last: tuple[tuple[int, int], Sees] = (0, 0), torch.empty(0)

    def __call__(self, shape: tuple[int, int]) -> Sees:
        """Of a batch of shape (B, T)."""
        if self._last[0] != shape:
            sees = training_sees(None, None, shape, self.mixer.window, self.mixer.sinks, self.model.device)
            kind = str(self.model.config._attn_implementation)
            self._last = shape, attention_mask_for(kind, sees, self.model.dtype)
        return self._last[1]


class Swap:
    """A teacher whose attention layers can be replaced by stand-ins, and put back.

    Args:
        model: the teacher, in evaluation mode.
        window: what stands in for a layer.
        layers: those that can be replaced; None for all.
        span: 1 where whole layers are kept, else the factor in the numbers of heads (`recipe.pattern.OpenChoice`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        window: SlidingMixer,
        layers: Sequence[int] | None = None,
        span: int = 1,
    ) -> None:
        self.window, self.span = window, span
        self.model = model.requires_grad_(False)
        spec = source_spec(model.config.model_type)
        self.layers = range(decoder_config(model.config).num_hidden_layers) if layers is None else layers
        self.attention: dict[int, nn.Module] = {i: model.get_submodule(spec.attention_path(i)) for i in self.layers}
        softmax: dict[int, Forward] = {i: attention.forward for i, attention in self.attention.items()}
        for attention in self.attention.values():
            use_window_attention(attention)
        mask = WindowMask(model, window)
        self.stand_ins = {i: Window(forward, mask) for i, forward in softmax.items()}

    @contextmanager
    def keeping(self, kept: Iterable[int]) -> Iterator[PreTrainedModel]:
        """The model with everything that can be replaced, but `kept`: layers, or numbers of heads."""
        heads: dict[int, tuple[int, ...]] = dict.fromkeys(self.layers, ())
        for unit in sorted(kept):
            heads[unit // self.span] += (unit % self.span,)
        counts = {layer: attention_dims(self.model.config, layer).kv_heads if self.span > 1 else 1 for layer in heads}
        replaced = {layer: own for layer, own in heads.items() if len(own) < counts[layer]}
        for layer, own in replaced.items():
            stand_in = self.stand_ins[layer]
            if own:
                stand_in = stand_in.keeping(HeadOrder(own, counts[layer]))
            self.attention[layer].forward = stand_in
        try:
            yield self.model
        finally:
            for layer in replaced:
                del self.attention[layer].forward


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
