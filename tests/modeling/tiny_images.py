"""Tiny random models of images and text, and prompts for them."""

from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sse_convert.modeling.architectures import IMAGE_TEXT
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class
from tests.modeling.tiny import _EXPERTS, _LINEAR, LAYOUT, MIXERS, VOCAB, randomise

IMAGE = 90
"""the token in whose place a feature of the image goes"""
FEATURES = 4
"""of one image"""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SIGHT = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 2}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_GRID = {
    "depth": 2,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    **_SIGHT,
}
_PLAIN_GRID = {name: value for name, value in _GRID.items() if name != "deepstack_visual_indexes"}
_PART_ROTATION = {**_ROTATION, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_GRID_TOKENS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_SQUARE = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, **_SIGHT}
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": {"rope_parameters": _ROTATION}, "vision_config": _GRID, **_GRID_TOKENS},
    "qwen2_5_vl": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_PLAIN_GRID, "window_size": 8, "fullatt_block_indexes": [1]},
        **_GRID_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {"rope_parameters": _ROTATION, **_EXPERTS},
        "vision_config": _GRID,
        **_GRID_TOKENS,
    },
    "qwen3_5": {
        "text_config": {"rope_parameters": _PART_ROTATION, **_LINEAR},
        "vision_config": _PLAIN_GRID,
        **_GRID_TOKENS,
    },
    "qwen3_5_moe": {
        "text_config": {
            "rope_parameters": _PART_ROTATION,
            **_LINEAR,
            **_EXPERTS,
            "shared_expert_intermediate_size": 12,
        },
        "vision_config": _PLAIN_GRID,
        **_GRID_TOKENS,
    },
    "gemma3": {
        "text_config": {"query_pre_attn_scalar": 8, **_WINDOWS},
        "vision_config": {"model_type": "siglip_vision_model", **_SQUARE},
        "mm_tokens_per_image": FEATURES,
        "image_token_index": IMAGE,
        "boi_token_index": 92,
        "eoi_token_index": 93,
    },
    "llama4": {
        "text_config": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 1, 0, 1],
        },
        "vision_config": {
            **_SQUARE,
            "intermediate_size": 64,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
        "image_token_index": IMAGE,
        "boi_token_index": 92,
        "eoi_token_index": 93,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3"},
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **_SQUARE},
        "image_token_index": IMAGE,
    },
}
IMAGE_MODELS = tuple(_MODELS)
BROKEN = {("llama4", "5.24.0"): "the plain model's forward raises: its language model gives no image_outputs"}
"""model type and version of transformers -> why no forward works there, converted or not"""


def unless_broken(model_type: str, *marks: pytest.MarkDecorator) -> ParameterSet:
    """A model type as a parameter of a test that runs it."""
    reason = BROKEN.get((model_type, transformers.__version__))
    return pytest.param(
        model_type, marks=[*marks, *([pytest.mark.xfail(strict=True, reason=reason)] if reason else [])]
    )


RUNNING_MODELS = tuple(map(unless_broken, IMAGE_MODELS))
_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def tiny_image_config(model_type: str) -> PreTrainedConfig:
    """Configuration of a source model with four decoder layers."""
    fields = _MODELS[model_type]
    config: PreTrainedConfig = getattr(transformers, IMAGE_TEXT[model_type].config_class)(
        **{**fields, "text_config": {**_TEXT, **fields["text_config"]}}
    )
    return config


def tiny_image_source(model_type: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random source model in evaluation mode."""
    torch.manual_seed(0)
    model = source_class(IMAGE_TEXT[model_type])(tiny_image_config(model_type))
    return _cast(randomise(model), dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """In evaluation mode; `to` would make real numbers of Llama 4's complex tables."""
    if dtype != torch.float64:
        return model.eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    return model.double().eval()


def tiny_image_model(
    model_type: str,
    layers: tuple[str, ...] = LAYOUT,
    mixers: dict[str, dict[str, Any]] | None = None,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A random converted model in evaluation mode, with the source's weights where it has them.

    Args:
        model_type: source family.
        layers: mixer name or `full` for each of the four layers.
        mixers: settings by name, over those of `MIXERS`.
        config: of the source; None for `tiny_image_config`.
        dtype: of the weights, float32 or float64.
    """
    torch.manual_seed(0)
    sse = {"layers": list(layers), "mixers": {**MIXERS, **(mixers or {})}, "base_model": "tiny"}
    whole = build_config(config or tiny_image_config(model_type), sse)
    model = randomise(model_class_for(source_class(IMAGE_TEXT[model_type]))(whole))
    source = tiny_image_source(model_type)
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert all("sse_" in name for name in missing)
    return _cast(model, dtype)


def image_prompts(model_type: str, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Two left-padded prompts of 14 and 11 tokens, each with an image, as a family's processor makes them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE, (2, 14), generator=generator)
    ids[:, 5:9] = IMAGE
    ids[:, 4], ids[:, 9] = 92, 93
    mask = torch.ones_like(ids)
    mask[1, :3], ids[1, :3] = 0, 0
    kinds = (ids == IMAGE).long()
    pixels = torch.randn(2, 3, 8, 8, generator=generator).to(dtype)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model_type in _GRIDS:
        patches = torch.randn(32, 12, generator=generator).to(dtype)
        return {
            **inputs,
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "mm_token_type_ids": kinds,
        }
    if model_type == "gemma3":
        return {**inputs, "pixel_values": pixels, "token_type_ids": kinds}
    if model_type == "llama4":
        return {**inputs, "pixel_values": pixels}
    return {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor([[8, 8]] * 2)}
