"""Tiny random models of every supported family, for tests."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from sse_convert.modeling.architectures import source_spec, spec_for
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class

VOCAB = 97
LAYERS = 4
PAD = 0
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HALF_ROTARY = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
_GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "layer_types": ["full_attention"] * 3 + ["linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_GROUPED = {**_ROUTED, "n_group": 2, "topk_group": 1}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]},
    "phi3": _HALF_ROTARY,
    "olmo2": {},
    "granite": {"logits_scaling": 4.0},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None, **_HALF_ROTARY},
    "gpt2": {"num_key_value_heads": None},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, **_LOCAL},
    "qwen3_moe": {"head_dim": 8, **_EXPERTS},
    "cohere2": _WINDOWS,
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 4, "final_logit_softcapping": 2.0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "glm4": {"head_dim": 8, **_HALF_ROTARY},
    "hunyuan_v1_dense": {"head_dim": 8},
    "stablelm": _HALF_ROTARY,
    "llama4_text": {
        "head_dim": 8, **_LOCAL, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "attention_chunk_size": 6,
        "no_rope_layers": [1, 1, 0, 1],
    },
    "deepseek_v3": {**_LATENT, **_GROUPED, "first_k_dense_replace": 1},
}  # fmt: skip
_ALIKE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "cohere": {},
    "cohere_compass_text": {
        **_WINDOWS,
        "logit_scale": 0.5,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "cwm": {"head_dim": 8, **_WINDOWS},
    "ernie4_5": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma4_unified_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
    },
    "glm": {"head_dim": 8, **_HALF_ROTARY},
    "helium": {"head_dim": 8},
    "hyperclovax": {"head_dim": 8, "logits_scaling": 0.5},
    "jais2": {"head_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": 6},
    "ministral3": {"head_dim": 8},
    "nanochat": {},
    "nemotron": {"head_dim": 8},
    "olmo": {},
    "olmo3": {"sliding_window": 6},
    "phi": _HALF_ROTARY,
    "seed_oss": {"head_dim": 8},
    "vaultgemma": _GEMMA,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "dots1": {"head_dim": 8, **_ROUTED, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
    "exaone_moe": {"head_dim": 8, "sliding_window": 6, **_EXPERTS, "num_shared_experts": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 8, "use_qk_norm": True, **_ROUTED, "first_k_dense_replace": 1, **_HALF_ROTARY},
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 12},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {"head_dim": 8, **_EXPERTS, "num_shared_experts": 1},
    "kolibri1": {"head_dim": 8, "sliding_window": 6, **_EXPERTS, "num_shared_experts": 1},
    "mellum": {"head_dim": 8, "sliding_window": 6, **_EXPERTS},
    "minimax_m2": {"head_dim": 8, **_LOCAL},
    "mixtral": _LOCAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _LOCAL,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 12},
    "flint": {
        "head_dim": 8,
        **_EXPERTS,
        "shared_expert_intermediate_size": 12,
        **_WINDOWS,
    },
    "granite_swa": {**_WINDOWS, "layer_rope_theta": [1e4] * 4},
    "granitemoe_swa": {**_LOCAL, **_WINDOWS, "layer_rope_theta": [1e4] * 4},
    "olmo_hybrid": _LINEAR,
    "granitemoehybrid": {
        **_LOCAL,
        "layer_types": ["full_attention"] * 3 + ["linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 12,
        "position_embedding_type": "rope",
    },
    "qwen3_next": {**_EXPERTS, "head_dim": 8, **_LINEAR, "shared_expert_intermediate_size": 12},
    "qwen3_5_text": {"head_dim": 8, **_LINEAR},
    "qwen3_5_moe_text": {**_EXPERTS, "head_dim": 8, **_LINEAR, "shared_expert_intermediate_size": 12},
    "solar_open": {"head_dim": 8, **_ROUTED},
    "axk1": {**_LATENT, **_GROUPED},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, **_ROUTED},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "kimi_linear": {
        **_LATENT,
        **_ROUTED,
        "num_local_experts": 4,
        "q_lora_rank": None,
        "layer_types": ["full_attention"] * 3 + ["linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "minicpm3": _LATENT,
    "youtu": {**_LATENT, "rope_interleave": False},
}
"""families whose entry says nothing that another's does not"""
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
PARTLY_FLOAT32 = (
    "dots1", "exaone_moe", "flint", "glm4_moe", "hy_v3", "kolibri1", "minimax_m2", "solar_open",
    "granitemoe_swa", "granitemoehybrid", "olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "llama4_text", "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear",
)  # fmt: skip
"""families whose own code computes routers, norms or linear attention in float32 whatever the model's dtype"""


def exact(model_type: str) -> dict[str, float]:
    """What equal outputs of a float64 model, converted or not, may differ by."""
    return {"atol": 1e-6 if source_spec(model_type).model_type in PARTLY_FLOAT32 else 1e-9, "rtol": 0}


FAMILIES = tuple(_FAMILIES)
"""families with something of their own, for every test that goes over families"""
LISTED = (*_FAMILIES, *_ALIKE)
"""all families"""
ENTRIES = tuple(name for name in LISTED if hasattr(transformers, spec_for(name).causal_lm_class))
"""those that this version of transformers has, for the tests that each must pass"""
SSE = {"kind": "sse", "qk_rank": 4}
MIXERS: dict[str, dict[str, Any]] = {
    "sse": SSE,
    "sliding": {"kind": "sliding", "window": 4, "sinks": 2},
    "sse+sliding": {**SSE, "kind": "sse+sliding", "window": 4, "sinks": 2},
    "sliding@1": {"kind": "sliding", "window": 4, "sinks": 2, "full_heads": [1]},
    "sse+sliding@0": {**SSE, "kind": "sse+sliding", "window": 4, "sinks": 2, "full_heads": [0]},
    "gdn": {"kind": "gdn"},
    "mixed": {
        **{**SSE, "update": "delta", "k_feature_map": "l2", "top_k": 2},
        "gate": {"write": False},
    },
    "delta": {**SSE, "update": "delta", "k_feature_map": "l2"},
}
LAYOUT = ("sse", "sliding", "sse", "full")
BASELINES = ("gdn", "mixed", "delta", "full")
"""the kinds that write by the delta rule"""
BESIDE = ("sse+sliding", "sliding", "sse+sliding", "full")
"""SSE beside a window"""
HEADS = ("sse+sliding", "sliding@1", "sse+sliding@0", "full")
"""the same; in two layers a key-value head sees the whole row"""


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Configuration of a 4-layer source model."""
    spec = spec_for(model_type)
    values = {**_COMMON, **(_FAMILIES | _ALIKE)[model_type], **overrides}
    values = {
        name: value
        for name, value in values.items()
        if name in ("eos_token_id", "q_lora_rank", "sliding_window") or value is not None
    }
    if model_type == "gpt2":
        values = {_GPT2_NAMES.get(name, name): value for name, value in values.items()}
    return getattr(transformers, spec.config_class)(**values)


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make outputs diverse, new tensors non-trivial and the pad embedding non-zero (or padding tests prove nothing)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.rpartition(".")[2] in ("sse_out_scale", "sse_k_scale", "sse_window_scale"):
                tensor.copy_(1 + 0.3 * noise)
            elif "sse_" in name:
                tensor.copy_(0.3 * noise)
            elif tensor.dim() > 1:
                tensor.copy_(0.15 * noise)
            elif name.endswith(".bias"):
                tensor.copy_(0.05 * noise)
            else:
                tensor.add_(0.1 * noise)
    return model


def tiny_source(
    model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random source model in evaluation mode."""
    torch.manual_seed(seed)
    model = source_class(spec_for(model_type))(tiny_config(model_type, **overrides))
    return _cast(randomise(model, seed), dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """In evaluation mode; with experts that can compute in float64, which torch's grouped products cannot."""
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def tiny_model(
    model_type: str,
    layers: tuple[str, ...] = LAYOUT,
    mixers: dict[str, dict[str, Any]] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A random converted model in evaluation mode.

    Args:
        model_type: source family.
        layers: mixer name or `full` for each of the 4 layers.
        mixers: settings by name, over those of `MIXERS`.
        dtype: of the weights.
        seed: of the weights.
        overrides: fields of the source configuration.
    """
    torch.manual_seed(seed)
    sse = {"layers": list(layers), "mixers": {**MIXERS, **(mixers or {})}, "base_model": "tiny"}
    config = build_config(tiny_config(model_type, **overrides), sse)
    model = model_class_for(source_class(spec_for(model_type)))(config)
    return _cast(randomise(model, seed), dtype)


def prompts(lengths: tuple[int, ...] = (11, 7), side: str = "left", seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask [rows, longest], padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        columns = slice(longest - length, longest) if side == "left" else slice(0, length)
        ids[row, columns] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, columns] = 1
    return ids, mask
