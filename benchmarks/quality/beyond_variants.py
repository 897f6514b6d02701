"""What may let softmax layers read more than they were trained on: other positions or sharper scores, in some layers.

A model keeps its weights. Hooks on the chosen attention layers replace rotary embeddings before a layer reads them, and
scale its queries. Queries carry the scale of the scores: after their norm where a family has one.
"""

import contextlib
import copy
import dataclasses as dc
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import backbone_of, source_spec


@dc.dataclass(frozen=True, slots=True)
class Variant:
    """One way."""

    rotary: Literal["own", "none", "yarn", "base"] = "own"
    """positions of the layers: the model's, none (NoPE), transformers' yarn from the trained length to the row's, or a
    base `LONGER_BASE` times the model's"""
    scale: Literal["none", "log", "temperature"] = "none"
    """of the scores: as they are; by log(position) / log(trained length), from that length on; or one factor for a row,
    (0.1 ln(row / trained length) + 1)^2, as yarn has it"""


LONGER_BASE = 10
VARIANTS = {
    "as it is": Variant(),
    "NoPE": Variant("none"),
    "log length": Variant("own", "log"),
    "temperature": Variant("own", "temperature"),
    "NoPE, log length": Variant("none", "log"),
    "NoPE, temperature": Variant("none", "temperature"),
    "longer base": Variant("base"),
    "yarn": Variant("yarn"),
    "yarn, log length": Variant("yarn", "log"),
}
"""by name; yarn's embedding brings its temperature along"""


def apply(
    model: PreTrainedModel, layers: Sequence[int], variant: Variant, *, trained: int, length: int
) -> list[torch.utils.hooks.RemovableHandle]:
    """Put a variant on some layers of a model; removing the handles takes it off.

    Args:
        model: plain or converted, of a family whose layers are given `position_embeddings`.
        layers: indices of attention layers; converted ones have positions and scores in their windows.
        variant: what to do.
        trained: tokens that the model was trained on.
        length: tokens of the rows to come.
    """
    spec, handles = source_spec(model.config.model_type), []
    rotary = _rotary(model, trained, length, variant.rotary) if variant.rotary in ("yarn", "base") else None
    for layer in layers:
        attention = model.get_submodule(spec.attention_path(layer))
        hooks = _Hooks(variant, rotary, trained, length)
        handles.append(attention.register_forward_pre_hook(hooks.before, with_kwargs=True))
        if variant.scale != "none":
            query = getattr(attention, "q_norm", None) or attention.get_submodule("q_proj")
            handles.append(query.register_forward_hook(hooks.scaled))
    return handles


@contextlib.contextmanager
def varied(
    model: PreTrainedModel, layers: Sequence[int], variant: Variant, *, trained: int, length: int
) -> Iterator[None]:
    """Inside, a model's layers have a variant. Arguments as of `apply`."""
    handles = apply(model, layers, variant, trained=trained, length=length)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    """Hooks of one layer."""

    def __init__(self, variant: Variant, rotary: nn.Module | None, trained: int, length: int) -> None:
        self._variant, self._rotary, self._trained, self._length = variant, rotary, trained, length
        self._positions: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember where tokens stand, and give the layer other embeddings of that."""
        hidden = args[0] if args else kwargs["hidden_states"]
        cos, sin = kwargs["position_embeddings"]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        self._positions = positions
        if self._variant.rotary == "none":
            kwargs = {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
        elif self._rotary is not None:
            kwargs = {**kwargs, "position_embeddings": self._rotary(hidden, positions)}
        return args, kwargs

    def scaled(self, module: nn.Module, args: tuple[Any, ...], query: Tensor) -> Tensor:
        """Queries [B, T, ...] with the scale of the scores."""
        assert self._positions is not None, "the layer's own hook comes first"
        if self._variant.scale == "temperature":
            return query * (0.1 * math.log(max(1.0, self._length / self._trained)) + 1) ** 2
        scale = (torch.log(self._positions.float() + 1) / math.log(self._trained)).clamp_min(1)
        return query * scale.view(*scale.shape, *[1] * (query.dim() - 2)).to(query.dtype)


def _rotary(model: PreTrainedModel, trained: int, length: int, kind: Literal["yarn", "base"]) -> nn.Module:
    """The family's rotary embedding with yarn, from the trained length to a row's, or with a longer base."""
    config = copy.deepcopy(decoder_config(model.config))
    yarn = {
        "rope_type": "yarn",
        "factor": max(1.0, length / trained),
        "original_max_position_embeddings": trained,
    }
    base = {"rope_theta": LONGER_BASE * config.rope_parameters["rope_theta"]}
    config.rope_parameters = {**config.rope_parameters, **(yarn if kind == "yarn" else base)}
    config.max_position_embeddings = max(trained, length)
    rotary: nn.Module = type(backbone_of(model).rotary_emb)(config=config)
    return rotary.to(model.device)
