"""Softmax attention of window layers: under a mask, or in blocks of queries, linear in the length.

A family's attention module calls the function that its configuration names. Window layers see their model's
configuration through `WindowConfig`, so that they call `window_attention`, which calls what the model names (sdpa,
eager with the family's soft caps, ...) with queries, keys and values as they are or with blocks of them as rows.
"""

import dataclasses as dc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sse_convert.modeling.context import (
    context_attention,
    current_shard,
    from_attention,
    softmax_attention,
    to_attention,
)

WINDOW_ATTENTION = "sse_window"
"""name under which transformers finds `window_attention`"""


@dc.dataclass(frozen=True, slots=True)
class WindowBlocks:
    """Who sees whom when each block of `window` queries attends to its sinks, the block before it and itself."""

    sees: Tensor
    """[B * blocks, 1, window, sinks + 2 * window], bool or in the form the attention takes"""
    sinks: Tensor
    """int64 [B, blocks * sinks], where each block's sinks are among the keys"""
    first: int
    """keys in front of those of consecutive columns: none, or the sinks that a cache keeps"""

    def to(self, device: torch.device | int | str, non_blocking: bool = False) -> "WindowBlocks":
        """The same on a device: as of a tensor, which is how tools that spread layers over devices move arguments."""
        sees, sinks = (x.to(device, non_blocking=non_blocking) for x in (self.sees, self.sinks))
        return WindowBlocks(sees, sinks, self.first)


Sees = Tensor | WindowBlocks
"""bool [B, 1, T, keys], True where the query sees the key; or in blocks"""


class HeadOrder:
    """Heads that see the whole row in front of the others, as indices. Which they are is data of a layer, not its code:
    layers with as many of them share a compiled program.

    Args:
        full: key-value heads that see the whole row, ascending, at least one.
        of: key-value heads of the layer, more than those.
    """

    def __init__(self, full: tuple[int, ...], of: int) -> None:
        self.heads = order = [*full, *(head for head in range(of) if head not in full)]
        self.full = len(full)
        # not a buffer: transformers leaves those that no checkpoint has empty
        self._order = torch.tensor([order, sorted(range(of), key=order.__getitem__)], device="cpu")

    def place(self, device: torch.device) -> None:
        """Keep the indices on a device, where compiled code finds them without copying."""
        if self._order.device != device:
            with torch.inference_mode(False):  # whoever trains later saves them for backward
                self._order = self._order.to(device)

    def apart(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """What of x belongs to the heads that see the whole row, and what to the others, each ascending.

        Args:
            x: any tensor with a dimension of heads, of each key-value head as many.
            dim: which dimension it is.
        """
        order, back = self._order.to(x.device)
        full = x.shape[dim] // len(order) * self.full
        made = _reordered(x, order, back, dim % x.dim())
        return made.narrow(dim, 0, full), made.narrow(dim, full, x.shape[dim] - full)

    def joined(self, full: Tensor, others: Tensor, dim: int) -> Tensor:
        """The whole of what `apart` took apart; each part's gradient is contiguous."""
        order, back = self._order.to(full.device)
        parts = [_ContiguousGradient.apply(x) for x in (full, others)]  # type: ignore[no-untyped-call]
        return _reordered(torch.cat(parts, dim), back, order, dim % full.dim())


@dc.dataclass(frozen=True, slots=True)
class ByHeads:
    """Who sees whom where some heads see the whole row and the others a window."""

    order: HeadOrder
    """which see the whole row"""
    whole: Tensor | None
    """their mask, as the family makes it for its own layers"""
    window: Sees | None
    """that of the others"""
    kept: Any
    """the layer of the cache, which keeps both apart; None without a cache"""


class WindowConfig:
    """A model's configuration, but for the attention function that it names.

    Args:
        attention: the family's attention module.
    """

    _attn_implementation = WINDOW_ATTENTION

    def __init__(self, attention: nn.Module) -> None:
        self.model: Any = attention.config
        self.eager: Callable[..., Any] = sys.modules[type(attention).__module__].eager_attention_forward

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # asked before they are set, of a copy in the making
            raise AttributeError(name)
        return getattr(self.model, name)


def use_window_attention(attention: nn.Module) -> None:
    """Let a family's attention module take masks in blocks; with others it is what it was. Twice is as once."""
    config: Any = attention.config
    if config._attn_implementation != WINDOW_ATTENTION:
        attention.config = WindowConfig(attention)  # type: ignore[assignment]


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sees | ByHeads | None,
    join: Callable[[Tensor], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a window layer's attention module calls.

    Args:
        module: the attention module, whose `config` is a `WindowConfig`.
        query: [B, Hq, T, D].
        key: [B, H, keys, D].
        value: [B, H, keys, D].
        attention_mask: who sees whom; None for causal.
        join: what becomes of the heads [B, T, Hq, D] with a window before the output projection.
        kwargs: scaling, dropout, soft cap and so on, for the attention function of the model.

    Returns:
        [B, T, Hq, D], and the attention weights where the model's function gives them for all keys.
    """
    if isinstance(attention_mask, ByHeads):
        return _by_heads(module, query, key, value, attention_mask, join, kwargs), None
    config: Any = module.config
    shard = current_shard()
    if shard is None:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config.model._attn_implementation, config.eager)
    else:
        attend = softmax_attention
        query, key, value = (to_attention(x, shard) for x in (query, key, value))
    weights: Tensor | None = None
    heads: Tensor
    if attention_mask is None or isinstance(attention_mask, Tensor):
        heads, weights = attend(module, query, key, value, attention_mask, **kwargs)
    else:
        heads = _in_blocks(attend, module, query, key, value, attention_mask, kwargs)
    if shard is not None:
        heads = from_attention(heads, shard)
    return heads if join is None else join(heads), weights


def _by_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: ByHeads,
    join: Callable[[Tensor], Tensor] | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention of heads that see the whole row, and of the others to their window: [B, T, Hq, D]."""
    config: Any = module.config
    kept = sees.kept
    (q, own_q), (k, own_k), (v, own_v) = (sees.order.apart(x, 1) for x in (query, key, value))
    if kept is not None:
        k, v = kept.whole.update(k, v)
        own_k, own_v = kept.update(own_k, own_v)
    whole = ALL_ATTENTION_FUNCTIONS.get_interface(config.model._attn_implementation, config.eager)
    full = (whole if current_shard() is None else context_attention)(module, q, k, v, sees.whole, **kwargs)[0]
    others = window_attention(module, own_q, own_k, own_v, sees.window, join, **kwargs)[0]
    return sees.order.joined(full, others, 2)


def _in_blocks(
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowBlocks,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention with each block of queries as a row: [B, T, Hq, D]."""
    batch, _, length, _ = query.shape
    size = window.sees.shape[2]
    blocks = len(window.sees) // batch
    query = _apart(F.pad(query, (0, 0, 0, blocks * size - length)), blocks).transpose(1, 2).flatten(0, 1)
    key, value = (_by_block(x, window, length, blocks) for x in (key, value))
    heads: Tensor = attend(module, query, key, value, window.sees, **kwargs)[0]
    return heads.reshape(batch, blocks * size, *heads.shape[2:])[:, :length]


def _by_block(x: Tensor, window: WindowBlocks, length: int, blocks: int) -> Tensor:
    """Keys or values [B, H, keys, D] as [B * blocks, H, sinks + 2 * window, D]."""
    size = window.sees.shape[2]
    index = window.sinks[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    sinks = _apart(x.gather(2, index), blocks)
    past = x.shape[2] - window.first - length
    recent = _apart(F.pad(x[:, :, window.first :], (0, 0, size - past, blocks * size - length)), blocks + 1)
    return torch.cat([sinks, recent[:, :, :-1], recent[:, :, 1:]], 3).transpose(1, 2).flatten(0, 1)


def _apart(x: Tensor, blocks: int) -> Tensor:
    """[B, H, blocks, n / blocks, D] of x [B, H, n, D]."""
    return x.reshape(*x.shape[:2], blocks, x.shape[2] // blocks, x.shape[3])


AttentionInterface.register(WINDOW_ATTENTION, window_attention)


def head_order(full: tuple[int, ...], of: int) -> HeadOrder | None:
    """The order of a layer of `of` key-value heads; None where no head sees the whole row."""
    return HeadOrder(full, of) if full else None


def _reordered(x: Tensor, order: Tensor, back: Tensor, dim: int) -> Tensor:
    """x with the heads of a dimension in another order; `back` undoes it."""
    heads = x.reshape(*x.shape[:dim], len(order), x.shape[dim] // len(order), *x.shape[dim + 1 :])
    made: Tensor = _Reordered.apply(heads, order, back, dim)  # type: ignore[no-untyped-call]
    return made.flatten(dim, dim + 1)


class _ContiguousGradient(torch.autograd.Function):
    """x, whose gradient is contiguous. torch keeps cuDNN's backward passes of attention by the layouts of queries,
    keys, values and masks alone: one that was built for other strides of a gradient would be wrong for this."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.contiguous()


class _Reordered(torch.autograd.Function):
    """x with its dimension of heads in another order. Backward reads, where that of `index_select` adds."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, *orders, ctx.dim = inputs
        ctx.save_for_backward(*orders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        order, back = ctx.saved_tensors
        return _Reordered.apply(grad, back, order, ctx.dim), None, None, None  # type: ignore[no-untyped-call]
