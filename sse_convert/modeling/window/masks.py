"""Who sees whom: under a window with sinks, of all keys at once or of the keys of each block of queries; and in packed
documents, for families whose own backbone does not look where positions restart.

A query under a window sees itself, the window - 1 columns before it, and the first `sinks` real tokens of its document.
"""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.compat import CACHE
from sse_convert.modeling.window.window_attention import WindowBlocks


@dc.dataclass(frozen=True, slots=True)
class Columns:
    """What visibility depends on, of consecutive columns: some of the past, then T of the queries."""

    real: Tensor
    """bool [B, columns], False for padding and for what a cache does not hold yet"""
    sink: Tensor
    """bool [B, columns], the first tokens of documents, which stay visible"""
    document: Tensor | None
    """int64 [B, columns], equal in one document; None for one document per row"""


def all_keys(columns: Columns, length: int, window: int) -> Tensor:
    """bool [B, T, columns], True where a query sees a key.

    Args:
        columns: of past and queries.
        length: T.
        window: columns a query sees, itself included.
    """
    key = torch.arange(columns.real.shape[1], device=columns.real.device)
    return _sees(key[-length:], key, columns, window)


def in_blocks(columns: Columns, far: Tensor, sinks: Tensor, length: int, window: int, first: int) -> WindowBlocks:
    """The same in blocks of `window` queries, T padded up to full ones.

    A block reaches window - 1 columns back, of which a cache holds no more. A document with sinks before those and
    queries in the block is the document of the block's first column, and there is no other.

    Args:
        columns: of past (at most window - 1) and queries.
        far: bool [B, blocks, window, sinks], whether a query sees the block's sinks that are out of its reach.
        sinks: int64 [B, blocks * sinks], where these are among the keys.
        length: T.
        window: columns a query sees, itself included.
        first: keys in front of those of the columns.
    """
    blocks = far.shape[1]
    pads = window - (columns.real.shape[1] - length), blocks * window - length
    real, sink = (F.pad(x, pads).unfold(1, 2 * window, window).flatten(0, 1) for x in (columns.real, columns.sink))
    document = None
    if columns.document is not None:
        document = F.pad(columns.document, pads).unfold(1, 2 * window, window).flatten(0, 1)
    slot = torch.arange(2 * window, device=real.device)
    near = _sees(slot[window:], slot, Columns(real, sink & (slot > 0), document), window)
    near = near | (slot == slot[window:, None])  # a softmax over nothing has no value, even where nobody asks for it
    return WindowBlocks(torch.cat([far.flatten(0, 1), near], 2)[:, None], sinks, first)


def _sees(query: Tensor, key: Tensor, columns: Columns, window: int) -> Tensor:
    """bool [B, queries, keys] of the columns' last queries and all their keys, numbered alike."""
    distance = query[:, None] - key
    sees = ((distance < window) | columns.sink[:, None]) & (distance >= 0) & columns.real[:, None]
    if columns.document is None:
        return sees
    return sees & (columns.document[:, None] == columns.document[:, -len(query) :, None])


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
