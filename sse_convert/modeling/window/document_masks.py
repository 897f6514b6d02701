"""Masks of packed documents for families whose own backbone does not look where positions restart."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.compat import CACHE


def packed_arguments(model: Any, position_ids: Tensor) -> dict[str, Any]:
    """What the backbone of a model takes beside positions that restart with each document: masks, where neither its
    family nor, converted, the model itself looks for that.

    Args:
        model: plain or converted.
        position_ids: int64 [B, T], on the model's device.
    """
    if hasattr(model.config, "sse") or source_spec(model.config.model_type).separates_documents:
        return {}
    return {"attention_mask": document_masks(backbone_of(model), position_ids)}


def document_masks(backbone: Any, position_ids: Tensor) -> dict[str, Any]:
    """What such a backbone takes as `attention_mask`: the mask of each of its kinds of softmax layers.

    Args:
        backbone: plain or converted.
        position_ids: int64 [B, T], restarting with each document.
    """
    embedding = backbone.get_input_embeddings().weight[:1, :1]
    given = {
        "config": backbone.config,
        "inputs_embeds": embedding.expand(*position_ids.shape, 1),  # shape, dtype and device are read
        "attention_mask": None,
        CACHE: None,
        "position_ids": position_ids,
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(**given) for kind, make in makers.items() if kind in backbone.config.layer_types}
