"""Which converted models vLLM serves, by its own classes of their source families; the others are refused by name."""

import importlib
from typing import Any

from vllm.config import CompilationConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from sse_convert.modeling.architectures import ARCHITECTURES, ArchSpec
from sse_convert.modeling.auto import register as register_with_transformers
from sse_convert.serving.vllm.checks import ServedConfig

MODELS = "vllm.model_executor.models"
SERVED = {
    "llama": "llama:LlamaForCausalLM",
    "mistral": "mistral:MistralForCausalLM",
    "ministral3": "mistral:MistralForCausalLM",
    "qwen2": "qwen2:Qwen2ForCausalLM",
    "qwen2_moe": "qwen2_moe:Qwen2MoeForCausalLM",
    "qwen3": "qwen3:Qwen3ForCausalLM",
    "qwen3_moe": "qwen3_moe:Qwen3MoeForCausalLM",
    "gemma": "gemma:GemmaForCausalLM",
    "gemma2": "gemma2:Gemma2ForCausalLM",
    "gemma3_text": "gemma3:Gemma3ForCausalLM",
}
"""model_type of the source -> vLLM's module and class"""
OPERATOR = "vllm::sse_attention"


def register_families() -> None:
    """Enter every family's converted model in vLLM's tables, those that are refused too."""
    register_with_transformers()
    for spec in ARCHITECTURES.values():
        name = spec.hybrid_causal_lm
        ModelRegistry.register_model(name, f"sse_convert.serving.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = ServedConfig
    operators = CompilationConfig._attention_ops
    if OPERATOR not in operators:
        operators.append(OPERATOR)


def engine_class(spec: ArchSpec) -> Any:
    """vLLM's class of a source family."""
    module, _, name = SERVED[spec.model_type].partition(":")
    return getattr(importlib.import_module(f"{MODELS}.{module}"), name)
