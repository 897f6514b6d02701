"""Window attention with sinks on any family: the source's attention module stays, its mask is replaced.

A query sees itself, the window - 1 columns before it, and the first `sinks` real tokens of its document.
"""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sse_convert.errors import UsageError
from sse_convert.kernels.torch_modes import traced
from sse_convert.mixers import WindowMixer
from sse_convert.modeling.compat import cache_argument
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.layout import LAYOUT, handed_cache
from sse_convert.modeling.sink_attention import SINK_ATTENTION
from sse_convert.modeling.window.masks import Columns, all_keys, in_blocks
from sse_convert.modeling.window.window_attention import ByHeads, HeadOrder, Sees, WindowBlocks, use_window_attention
from sse_convert.modeling.window_cache import SlidingCacheLayer

MASKS = "sse_sliding_masks"
"""keyword argument that carries the masks, one per (window, sinks), keyed by `mask_key`"""
TOKEN_ATTENTION = "sse_token_attention"
"""name under which one-token steps over fixed caches may have their own softmax attention; its masks are sdpa's"""
ATTENTION_KINDS = ("sdpa", "eager")
NOT_SEEN = 2**62
"""column of a token that has not arrived yet"""


def mask_key(window: int, sinks: int) -> str:
    """Name of the mask of a (window, sinks) pair."""
    return f"{window}+{sinks}"


class SlidingHook:
    """Forward pre-hook that hands an attention module its window mask. An object, so that models can be pickled."""

    def __init__(self, layer_idx: int, mixer: WindowMixer, cache_argument: str, order: HeadOrder | None) -> None:
        self.layer_idx = layer_idx
        self.mixer = mixer
        self.cache_argument = cache_argument
        self.order = order

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace `attention_mask`; an error if the masks did not arrive, or another cache than the forward's."""
        handed_cache(kwargs, self.cache_argument, kwargs.get(LAYOUT), self.layer_idx)
        return args, with_window(kwargs, self.layer_idx, self.mixer, self.cache_argument, self.order)


def with_window(
    kwargs: dict[str, Any], layer_idx: int, mixer: WindowMixer, cache_argument: str, order: HeadOrder | None
) -> dict[str, Any]:
    """The arguments of an attention module with its window's mask as `attention_mask`; where some heads see the whole
    row, with the masks of both kinds, and the layer of the cache, which keeps them apart.

    Raises:
        UsageError: the masks did not arrive.
    """
    if MASKS not in kwargs:
        raise UsageError(
            f"layer {layer_idx} received no {MASKS}",
            expected="a decoder layer that hands its keyword arguments to its attention",
            fix="call the model, not the layer",
        )
    rest = {name: value for name, value in kwargs.items() if name != MASKS}
    sees = kwargs[MASKS][mask_key(mixer.window, mixer.sinks)]
    if order is None:
        return {**rest, "attention_mask": sees}
    cache = rest.get(cache_argument)
    kept = None if cache is None else cache.layers[layer_idx]
    by_heads = ByHeads(order, kwargs.get("attention_mask"), sees, kept)
    return {**rest, cache_argument: None, "attention_mask": by_heads}


def make_sliding(attention: nn.Module, layer_idx: int, mixer: WindowMixer, order: HeadOrder | None) -> None:
    """Limit a softmax attention module to a window with sinks, but for heads that see the whole row."""
    use_window_attention(attention)
    hook = SlidingHook(layer_idx, mixer, cache_argument(type(attention)), order)
    attention.register_forward_pre_hook(hook, with_kwargs=True)


def training_mask(
    mask: Tensor | None, starts: Tensor | None, shape: tuple[int, int], window: int, sinks: int, device: torch.device
) -> Tensor:
    """Who sees whom in a batch without cache, of all keys.

    Args:
        mask: bool [B, T], False for padding; None for none.
        starts: bool [B, T], first token of each packed document; None for one document per row.
        shape: (B, T).
        window: columns a query sees, itself included.
        sinks: first tokens of a document that stay visible.
        device: of the result.

    Returns:
        bool [B, 1, T, T], True where the query (third dim) sees the key.
    """
    columns, _ = _row_columns(mask, starts, shape, sinks, device)
    return all_keys(columns, shape[1], window)[:, None]


def training_sees(
    mask: Tensor | None, starts: Tensor | None, shape: tuple[int, int], window: int, sinks: int, device: torch.device
) -> Sees:
    """As `training_mask`; in blocks for rows of more than two windows, so that memory and time are linear in T."""
    length = shape[1]
    if length <= 2 * window:
        return training_mask(mask, starts, shape, window, sinks, device)
    columns, before = _row_columns(mask, starts, shape, sinks, device)
    wanted = before[:, ::window, None] + torch.arange(1, sinks + 1, device=device)
    found = torch.searchsorted(columns.real.long().cumsum(1), wanted.flatten(1))
    far = _out_of_reach(found.view(wanted.shape), 0, window).expand(-1, -1, window, -1)
    if columns.document is not None:
        document = F.pad(columns.document, (0, wanted.shape[1] * window - length)).view(len(before), -1, window)
        far = far & (document == document[..., :1])[..., None]
    return in_blocks(columns, far, found.clamp_max(length - 1), length, window, 0)


def _row_columns(
    mask: Tensor | None, starts: Tensor | None, shape: tuple[int, int], sinks: int, device: torch.device
) -> tuple[Columns, Tensor]:
    """The columns of rows without past; and how many real tokens [B, T] of the row precede a token's document."""
    real = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device)
    rank = real.long().cumsum(1)
    if starts is None:
        return Columns(real, rank <= sinks, None), torch.zeros_like(rank)
    starts = starts.to(device)
    before = torch.where(starts, rank - 1, 0).cummax(1).values  # packed rows have no padding
    return Columns(real, rank - before <= sinks, starts.long().cumsum(1)), before


def _out_of_reach(columns: Tensor, first: Any, window: int) -> Tensor:
    """bool [B, blocks, 1, sinks], whether sinks lie more than window - 1 columns before each block of queries, the
    first of which begins at column `first`; of their columns [B, blocks, sinks]."""
    begin = torch.arange(columns.shape[1], device=columns.device) * window + first
    far: Tensor = columns <= begin[:, None] - window
    return far[:, :, None]


def cached_sees(
    layer: SlidingCacheLayer,
    attention_mask: Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
    whole: bool = False,
) -> tuple[Sees, Tensor]:
    """Who sees whom when `layer` holds the past.

    Args:
        layer: the cache layer, before its update.
        attention_mask: [B, past + T] padding mask, or None.
        batch: B.
        length: T.
        device: of the results.
        whole: not in blocks, however long.

    Returns:
        bool [B, 1, T, sinks + window - 1 + T], in the order in which the layer returns keys, or in blocks for more than
        two windows of tokens; and the column of each row's sinks, int64 [B, sinks], for
        `SlidingCacheLayer.locate_sinks`.
    """
    seen = layer.seen.to(device) if isinstance(layer.seen, Tensor) else layer.seen
    recent = torch.arange(layer.past_columns + length, device=device) + (seen - layer.past_columns)
    if attention_mask is None:
        real = (recent >= 0).expand(batch, -1)
        sink_columns = torch.arange(layer.sinks, device=device).expand(batch, -1)
    else:
        filled = attention_mask.to(device).bool()
        real = (recent >= 0) & filled[:, recent.clamp(0, filled.shape[1] - 1)]
        wanted = torch.arange(1, layer.sinks + 1, device=device).expand(batch, -1)
        found = torch.searchsorted(filled.long().cumsum(1), wanted.contiguous())
        sink_columns = torch.where(found < filled.shape[1], found, NOT_SEEN)
    columns = Columns(real, (recent[None, :, None] == sink_columns[:, None]).any(2), None)
    window = layer.window
    if whole or length <= 2 * window:
        in_store = (sink_columns < recent[0])[:, None].expand(batch, length, layer.sinks)
        return torch.cat([in_store, all_keys(columns, length, window)], 2)[:, None], sink_columns
    blocks = -(-length // window)
    stored = torch.arange(layer.sinks, device=device).repeat(batch, blocks)
    far = _out_of_reach(sink_columns[:, None].expand(-1, blocks, -1), seen, window).expand(-1, -1, window, -1)
    return in_blocks(columns, far, stored, length, window, layer.sinks), sink_columns


def sliding_masks(
    windows: dict[int, tuple[int, int]],
    cache: Any,
    attention_mask: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    whole: bool = False,
) -> dict[str, Sees | None]:
    """The masks of one forward, one per (window, sinks); with a cache, its layers learn where their sinks are.

    Args:
        windows: index of each sliding layer -> (window, sinks).
        cache: the cache, with its layers installed, or None.
        attention_mask: [B, past + T] padding mask as given, or None.
        mask: bool [B, T] part of it for the new tokens; None for no padding.
        starts: bool [B, T] first tokens of packed documents, or None.
        shape: (B, T).
        device: of the masks.
        whole: not in blocks, which give no attention weights.

    Returns:
        `mask_key` -> bool [B, 1, T, keys], or in blocks; None where one token sees all that is kept.
    """
    masks: dict[str, Sees | None] = {}
    for pair in sorted(set(windows.values())):
        if cache is None:
            sees = training_mask if whole else training_sees
            masks[mask_key(*pair)] = sees(mask, starts, shape, *pair, device)
            continue
        layers = [cache.layers[index] for index, own in windows.items() if own == pair]
        if not whole and device.type == "cpu" and shape[1] == 1 and sees_all(layers[0], attention_mask):
            masks[mask_key(*pair)] = None
            for layer in layers:
                layer.turn()
            continue
        masks[mask_key(*pair)], sinks = cached_sees(layers[0], attention_mask, *shape, device, whole)
        for layer in layers:
            layer.locate_sinks(sinks, attention_mask is not None)
    return masks


def sees_all(layer: SlidingCacheLayer, attention_mask: Tensor | None) -> bool:
    """Whether one new token sees all that a layer keeps, and the layer may keep it in any order.

    Args:
        layer: the cache layer, before its update.
        attention_mask: [B, past + 1] padding mask, or None; its values are looked at.
    """
    if traced() or layer.is_static or layer.record_past or torch.is_grad_enabled():
        return False
    full = layer.is_initialized and layer.seen >= layer.past_columns + layer.sinks
    return full and (attention_mask is None or bool(attention_mask.all()))


def attention_mask_for(kind: str, sees: Sees, dtype: torch.dtype) -> Sees:
    """The mask in the form that an attention implementation takes.

    Raises:
        UsageError: the implementation cannot follow a window with sinks.
    """
    if kind not in (*ATTENTION_KINDS, TOKEN_ATTENTION, DOCUMENT_ATTENTION, SINK_ATTENTION):
        raise UsageError(
            f"attention implementation is {kind!r}, and the model has converted sliding layers",
            expected=f"one of {', '.join(ATTENTION_KINDS)}",
            fix="load the model without attn_implementation",
        )
    if kind != "eager":
        return sees
    if isinstance(sees, WindowBlocks):
        return dc.replace(sees, sees=_additive(sees.sees, dtype))
    return _additive(sees, dtype)


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)  # eager attention's softmax is in float32
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, hidden)
