"""Which converted models vLLM serves, by its own classes of their source families; the others are refused by name."""

import importlib
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from sse_convert.compat import cut_graphs_at
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.architectures import ARCHITECTURES
from sse_convert.modeling.auto import register as register_with_transformers
from sse_convert.serving.vllm.checks import SERVED, ServedConfig

MODELS = "vllm.model_executor.models"
OPERATOR = "vllm::sse_attention"


def register_families() -> None:
    """Enter every family's converted model in vLLM's tables, those that are refused too."""
    register_with_transformers()
    for spec in ARCHITECTURES.values():
        name = spec.hybrid_causal_lm
        ModelRegistry.register_model(name, f"sse_convert.serving.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = ServedConfig
    cut_graphs_at(OPERATOR)


def engine_class(spec: ArchSpec) -> Any:
    """vLLM's class of a source family."""
    module, _, name = SERVED[spec.model_type].partition(":")
    return getattr(importlib.import_module(f"{MODELS}.{module}"), name)
