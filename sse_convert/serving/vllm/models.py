"""vLLM's own model classes with converted layers: `SSEQwen3ForCausalLM` and so on, derived on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

from sse_convert.modeling.architectures import ARCHITECTURES, spec_for
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.serving.vllm.attention import engine_layer
from sse_convert.serving.vllm.checks import SERVED, SOURCE_LAYER_TYPES, check_model, row_bytes
from sse_convert.serving.vllm.families import engine_class

_Source: Any = object
"""what the mixin is put in front of; to a type checker, a class with any attribute"""


class HybridModel(_Source):
    """Goes in front of one of vLLM's classes. The attributes are how vLLM knows what a model has."""

    has_inner_state = True
    is_hybrid = True
    supports_mamba_prefix_caching = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        check_model(config)
        with _source_layer_types(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for index, mixer in enumerate(layer_mixers(config)):
            if mixer is not None:
                layer = self.model.layers[index]
                layer.self_attn = engine_layer(layer.self_attn, vllm_config, index, mixer)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Shape of what a request keeps of a layer: a row of bytes."""
        return ((row_bytes(vllm_config),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Type of its elements."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """How it is copied for prefix caching: whole."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """The same by what layers are grouped by."""
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())


@contextmanager
def _source_layer_types(config: Any) -> Iterator[None]:
    """The `layer_types` of the source, by which vLLM's classes choose windows and rotations, for a while."""
    served = config.layer_types
    config.layer_types = getattr(config, SOURCE_LAYER_TYPES)
    try:
        yield
    finally:
        config.layer_types = served


def _served_class(name: str) -> type:
    """The class of a family; of one that is refused some class, since vLLM looks at it before it asks us."""
    spec = next(spec for spec in ARCHITECTURES.values() if spec.hybrid_causal_lm == name)
    source = engine_class(spec if spec.model_type in SERVED else spec_for("llama"))
    return type(name, (HybridModel, source), {"__module__": __name__, "__doc__": f"{source.__name__} with SSE layers."})


def __getattr__(name: str) -> type:
    if any(spec.hybrid_causal_lm == name for spec in ARCHITECTURES.values()):
        made = globals()[name] = _served_class(name)
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
