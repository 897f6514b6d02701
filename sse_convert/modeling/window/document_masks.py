"""Masks of packed documents for families whose own backbone does not look where positions restart."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask


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
        "past_key_values": None,
        "position_ids": position_ids,
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(**given) for kind, make in makers.items() if kind in backbone.config.layer_types}
