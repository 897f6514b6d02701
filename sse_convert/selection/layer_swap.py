"""Stand-ins for attention layers, swapped into one model in place: the teacher's modules stay where they are.

Rows are one document each, without padding and without a cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.calibration.attention_statistics import Collector
from sse_convert.calibration.initial_values import branch_windows, decay_values, output_scale
from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer, SSESlidingMixer, WindowMixer
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.initialise import fresh_sse_tensors
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import row_layout
from sse_convert.modeling.window.sliding import MASKS, attention_mask_for, mask_key, training_sees
from sse_convert.modeling.window.window_attention import ByHeads, HeadOrder, Sees, use_window_attention
from sse_convert.modeling.window.window_branch import attention_layer
from sse_convert.recipe.schema import Recipe

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

    def __init__(self, model: PreTrainedModel, mixer: WindowMixer) -> None:
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


class Recurrent:
    """A layer with a recurrent state on the teacher's projections.

    Args:
        layer: the layer.
        mask: of its window, if it has one.
    """

    def __init__(self, layer: SSEAttention, mask: WindowMask | None) -> None:
        self.layer = layer
        self.mask = mask

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As the layer's attention."""
        hidden = _hidden(args, kwargs)
        shape = hidden.shape[0], hidden.shape[1]
        layout = row_layout(*shape, None, hidden.device)
        if self.mask is not None:
            window = self.mask.mixer
            kwargs[MASKS] = {mask_key(window.window, window.sinks): self.mask(shape)}
        output, weights = self.layer(*args, sse_layout=layout, **kwargs)
        return output, weights


class Swap:
    """A teacher whose attention layers can be replaced by stand-ins, and put back.

    Args:
        model: the teacher, in evaluation mode.
        mixer: what stands in for a layer.
        recipe: `calibrate` and the seed set the tensors of recurrent stand-ins.
        rows: int64 [R, T] token ids that calibrate them.
        layers: those that can be replaced; None for all.
        span: 1 where whole layers are kept, else the factor in the numbers of heads (`recipe.pattern.OpenChoice`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mixer: Mixer,
        recipe: Recipe,
        rows: Tensor,
        layers: Sequence[int] | None = None,
        span: int = 1,
    ) -> None:
        self.mixer, self.span = mixer, span
        self.model = model.requires_grad_(False)
        spec = source_spec(model.config.model_type)
        self.layers = range(decoder_config(model.config).num_hidden_layers) if layers is None else layers
        self.attention: dict[int, nn.Module] = {i: model.get_submodule(spec.attention_path(i)) for i in self.layers}
        softmax: dict[int, Forward] = {i: attention.forward for i, attention in self.attention.items()}
        self.stand_ins: Mapping[int, Forward]
        if isinstance(mixer, SlidingMixer):
            for attention in self.attention.values():
                use_window_attention(attention)
            mask = WindowMask(model, mixer)
            self.stand_ins = {i: Window(forward, mask) for i, forward in softmax.items()}
        else:
            beside = WindowMask(model, mixer) if isinstance(mixer, SSESlidingMixer) else None
            made = calibrated_layers(model, mixer, recipe, rows, self.layers)
            self.stand_ins = {i: Recurrent(layer, beside) for i, layer in made.items()}

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
            if own and isinstance(stand_in, Window):
                stand_in = stand_in.keeping(HeadOrder(own, counts[layer]))
            self.attention[layer].forward = stand_in
        try:
            yield self.model
        finally:
            for layer in replaced:
                del self.attention[layer].forward


def calibrated_layers(
    model: PreTrainedModel, mixer: SSEMixer, recipe: Recipe, rows: Tensor, layers: Sequence[int]
) -> dict[int, SSEAttention]:
    """Untrained recurrent layers on a teacher's modules, their decays and scales set by what it does on `rows`.

    Args:
        model: the teacher.
        mixer: settings of the layers.
        recipe: `calibrate` and the seed are read.
        rows: int64 [R, T] token ids.
        layers: which.
    """
    spec = source_spec(model.config.model_type)
    kind = model.config._attn_implementation
    windows = branch_windows(dict.fromkeys(layers, mixer))
    collector = Collector(model, spec, list(layers), windows=windows)
    _run(collector, rows)
    made = {}
    for i in layers:
        dims = attention_dims(model.config, i)
        values = fresh_sse_tensors(dims, mixer, torch.Generator().manual_seed(recipe.train.seed + i))
        values |= decay_values(mixer, dims, collector.statistics[i])
        if recipe.calibrate.output_scale != "none":
            values["sse_out_scale"] = torch.ones_like(values["sse_out_scale"])
        source = model.get_submodule(spec.attention_path(i))
        layer = attention_layer(source, decoder_config(model.config), i, spec=spec, mixer=mixer)
        layer.load_state_dict(values, strict=False)
        made[i] = layer.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    if (scaled := recipe.calibrate.output_scale) != "none":
        second = Collector(model, spec, list(layers), windows=windows, students=made)
        _run(second, rows)
        for i, layer in made.items():
            layer.load_state_dict(output_scale(scaled, mixer, layer.source_dims, second.statistics[i]), strict=False)
    model.set_attn_implementation(kind)
    return made


def _run(collector: Collector, rows: Tensor) -> None:
    device = collector.model.device
    positions = torch.arange(rows.shape[1], device=device)[None]
    for row in rows:
        collector.run({"input_ids": row[None].to(device), "position_ids": positions})


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
