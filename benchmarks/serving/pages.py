"""Layers of a model of the package's as an engine runs them: states in rows of pages, hand-made batches."""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.projections import projections
from sse_convert.serving.batch import Batch, batch_of
from sse_convert.serving.layer_state import ServedAttention, ServedSliding, state_shapes
from sse_convert.serving.ring import RingWindow


class TableRotary:
    """A model's rotation of queries and keys, from a table of its angles."""

    def __init__(self, backbone: Any, positions: int) -> None:
        x = backbone.get_input_embeddings().weight[:1, :1]
        at = torch.arange(positions, device=x.device)[None]
        cos, sin = (part[0, :, : part.shape[-1] // 2] for part in backbone.rotary_emb(x, at))
        self.cos_sin_cache = torch.cat([cos, sin], -1)

    def __call__(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions.long()][:, None].chunk(2, -1)
        dims = 2 * cos.shape[-1]

        def turned(flat: Tensor) -> Tensor:
            first, second = flat.view(flat.shape[0], -1, dims).chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view_as(flat)

        return turned(q), turned(k)


@dc.dataclass(frozen=True, slots=True)
class Served:
    """A converted layer with its pages."""

    source: nn.Module
    layer: Any
    output: nn.Module
    pages: tuple[Tensor, ...]

    def __call__(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """[T, hidden] of x [T, hidden], projections included."""
        projected = projections(self.source, self.layer.spec, self.layer.dims, x)
        return self.output(self.layer.attend(x, projected, positions, batch, self.pages))


def served_layer(model: Any, index: int, rotary: TableRotary, rows: int, state_type: torch.dtype) -> Served:
    """A converted layer of a model over pages of `rows` rows, the first of them nobody's.

    Args:
        model: a converted causal language model without query-key norms that follow the rotation.
        index: of a converted layer.
        rotary: of the model.
        rows: of the pages.
        state_type: of states; rings are of the model's.
    """
    config, spec, dims = model.config, source_spec(model.config.model_type), attention_dims(model.config)
    attention: Any = getattr(getattr(getattr(model, spec.backbone), spec.layers)[index], spec.attention)
    mixer: Any = layer_mixers(config)[index]
    window = None
    if isinstance(mixer, SlidingMixer | SSESlidingMixer):
        window = RingWindow(window=mixer.window, sinks=mixer.sinks, scale=attention.scaling)
    layer: Any
    if isinstance(mixer, SlidingMixer):
        layer = ServedSliding(attention, dims, spec=spec, window=window, rotary=rotary)
    else:
        layer = ServedAttention(attention, config, index, spec=spec, mixer=mixer, window=window, rotary=rotary)
        layer.load_state_dict(attention.state_dict())
    weight = getattr(attention, spec.output).weight
    pages = pages_for(dims, mixer, rows, state_type, weight)
    return Served(attention, layer.to(weight.device, weight.dtype), getattr(attention, spec.output), pages)


def pages_for(dims: Any, mixer: Mixer, rows: int, state_type: torch.dtype, like: Tensor) -> tuple[Tensor, ...]:
    """Memory for the states, then the rings, of `rows` requests; NaN where nobody has written."""
    types = (state_type,) * isinstance(mixer, SSEMixer) + (like.dtype,)
    return tuple(
        torch.full((rows, *shape), torch.nan, dtype=dtype, device=like.device)
        for shape, dtype in zip(state_shapes(dims, mixer), types, strict=False)
    )


def layer_io(model: Any, index: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a model's own layer is given and gives for ids [1, T], both [T, hidden]."""
    spec = source_spec(model.config.model_type)
    attention = getattr(getattr(getattr(model, spec.backbone), spec.layers)[index], spec.attention)
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.extend((kwargs["hidden_states"][0], output[0][0]))

    handle = attention.register_forward_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return seen[0], seen[1]


@torch.no_grad()
def run_steps(
    served: Served, rows: list[Tensor], steps: Sequence[dict[int, int]], slots: Sequence[int]
) -> list[Tensor]:
    """What a served layer gives for requests whose tokens come over several steps.

    Args:
        served: the layer.
        rows: [tokens, hidden] of each request.
        steps: new tokens by request, those with a single one in front; negative numbers stand for padding.
        slots: row of each request.
    """
    past, found = [0] * len(rows), [list[Tensor]() for _ in rows]
    for step in steps:
        alone = next((i for i, length in enumerate(step.values()) if length > 1), len(step))
        parts = [rows[0][:1] if r < 0 else rows[r][past[r] : past[r] + length] for r, length in step.items()]
        own = [(-1, 0) if r < 0 else (slots[r], past[r]) for r in step]
        batch = batch_of(alone, list(step.values()), [slot for slot, _ in own], [p for _, p in own], rows[0].device)
        positions = torch.cat([torch.arange(len(part)) + p for part, (_, p) in zip(parts, own, strict=True)])
        y = served(torch.cat(parts), positions.to(rows[0].device), batch).split([len(part) for part in parts])
        for (r, length), out in zip(step.items(), y, strict=True):
            if r >= 0:
                found[r].append(out)
                past[r] += length
    return [torch.cat(parts) for parts in found]
