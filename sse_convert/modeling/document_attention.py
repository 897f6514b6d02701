"""Softmax attention of packed rows without a mask of all pairs of tokens: each document attends to itself.

Memory is linear in the tokens. On a GPU one call of torch's variable-length flash attention does all documents; where
that has no kernel (CPUs, float32, wide heads), documents are attended to one after another, or, where no value may be
read, under a mask of all pairs.

Shape letters: T tokens of all rows, S documents, Hq query heads, H heads of keys and values, D width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sse_convert.errors import UsageError
from sse_convert.kernels.torch_modes import traced
from sse_convert.modeling.compat import varlen_attention
from sse_convert.modeling.layout import SequenceLayout
from sse_convert.modeling.sink_attention import attend_with_sinks, documents_with_sinks

DOCUMENT_ATTENTION = "sse_documents"
"""name under which transformers finds `document_attention`; it has no masks made for it"""
_scaled_dot_product: Callable[..., tuple[Tensor, None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sse_layout: SequenceLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a family's attention module calls, within rows that are full of tokens.

    Args:
        module: the attention module.
        query: [B, Hq, T / B, D].
        key: [B, H, T / B, D].
        value: [B, H, T / B, D].
        attention_mask: who sees whom, of a converted layer's window; None for causal in documents.
        sse_layout: where documents begin.
        scaling: of the products; None for D ** -0.5.
        sliding_window: tokens a query sees, itself included; None for all.
        s_aux: learned sinks [Hq]; None for none.
        kwargs: what families pass to their attention functions.

    Returns:
        [B, T / B, Hq, D], and None for the weights.

    Raises:
        UsageError: no mask and no layout arrived, or a cache or padding is in use.
    """
    if attention_mask is not None:
        if s_aux is not None:
            return attend_with_sinks(query, key, value, attention_mask, s_aux, scaling), None
        return _scaled_dot_product(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, length = query.shape[0], query.shape[2]
    if sse_layout is None or sse_layout.tokens is not None or key.shape[2] != length:
        raise UsageError(
            f"attention implementation {DOCUMENT_ATTENTION!r} without sse_layout, or with padding or a cache",
            expected="training on rows that are full of tokens",
            fix="load the model without attn_implementation",
        )
    windowed = sliding_window is not None and sliding_window < length
    if not sse_layout.documents and not windowed and s_aux is None:
        return _scaled_dot_product(module, query, key, value, None, scaling=scaling, **kwargs)
    if traced() and not _has_kernel(query):
        sees = _pairs(sse_layout.cu_seqlens, batch, length, sliding_window)
        return document_attention(module, query, key, value, sees, scaling=scaling, s_aux=s_aux, **kwargs)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    offsets, longest = sse_layout.cu_seqlens, sse_layout.max_seqlen
    window = sliding_window if windowed else None
    o = attend_to_documents(q, k, v, offsets, longest, scaling=scaling, window=window, sinks=s_aux)
    return o.view(batch, length, *o.shape[1:]), None


def attend_to_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    *,
    scaling: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention within documents: [T, Hq, V].

    Args:
        q: [T, Hq, D].
        k: [T, H, D]; H divides Hq.
        v: [T, H, V].
        offsets: integer [S + 1], where documents begin, then T, once or more.
        longest: no document has more tokens.
        scaling: of the products; None for D ** -0.5.
        window: tokens a query sees, itself included; None for all.
        sinks: learned, [Hq]; None for none.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if _has_kernel(q):
        return _by_kernel(q, k, v, offsets.to(q.device, torch.int32), longest, scaling, window, sinks)
    heads = [
        _attend(q[begin:end], k[begin:end], v[begin:end], scaling, window, sinks)
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if begin < end
    ]
    return torch.cat(heads)


def _by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same by a kernel that wants keys and values of one size: the smaller ones end in zeros."""
    key, value = q.shape[-1], v.shape[-1]
    scaling = key**-0.5 if scaling is None else scaling
    if key != value:
        q, k, v = (F.pad(x, (0, max(key, value) - x.shape[-1])) for x in (q, k, v))
    if sinks is None:
        o = varlen_attention(q, k, v, offsets, longest, scaling, window)
    else:
        o = documents_with_sinks(q, k, v, sinks, offsets, longest, scaling, window)
    return o if key == value else o[..., :value]


def _pairs(offsets: Tensor, batch: int, length: int, window: int | None) -> Tensor:
    """bool [B, 1, T / B, T / B], True where a query sees a key; other arguments as of `attend_to_documents`."""
    index = torch.arange(batch * length, device=offsets.device).view(batch, length)
    document = torch.searchsorted(offsets[1:], index, right=True)
    distance = index[:, :, None] - index[:, None]
    sees = (distance >= 0) & (document[:, :, None] == document[:, None])
    return (sees if window is None else sees & (distance < window))[:, None]


def _has_kernel(q: Tensor) -> bool:
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """One document: [n, Hq, D]."""
    length, groups = len(q), q.shape[1] // k.shape[1]
    sees = None
    if window is not None and window < length:
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        sees = (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if sinks is not None:
        seen = None if sees is None else sees[None, None]
        return attend_with_sinks(q[None], k[None], v[None], seen, sinks, scaling)[0]
    if sees is not None:
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))  # kernels share keys under no mask alone
    shares = sees is None and groups > 1
    o = F.scaled_dot_product_attention(q, k, v, sees, is_causal=sees is None, scale=scaling, enable_gqa=shares)
    return o.transpose(0, 1)


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
