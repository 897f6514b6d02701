"""One new token per row of layers with a window, in few launches: the window alone or beside SSE, of all heads or of
those that do not see the whole row.

Shape letters: B rows, Hq query heads, H key heads, D head dim.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.inference.fused_attention import (
    MASKED_ATTENTION,
    CacheHeads,
    Projected,
    StateHeads,
    new_projections,
)
from sse_convert.inference.fused_norms import Norm
from sse_convert.inference.fused_weights import Pair, added, plain_tensor, projection
from sse_convert.inference.token_ring import TokenRing
from sse_convert.mixers import WindowMixer
from sse_convert.modeling.compat import CACHE, hooks_of
from sse_convert.modeling.context import current_shard
from sse_convert.modeling.layout import LAYOUT
from sse_convert.modeling.window.sliding import SlidingHook
from sse_convert.modeling.window.window_attention import HeadOrder
from sse_convert.modeling.window.window_branch import SSESlidingAttention
from sse_convert.modeling.window_cache import SlidingCacheLayer

OWN = ("q", "k", "v")
WHOLE = ("whole_q", "whole_k", "whole_v")
"""projections of the heads that see the whole row"""


def window_hook(attention: nn.Module) -> SlidingHook | None:
    """What makes a family's attention one with a window; None where it has none, or more stands around it."""
    hooks = hooks_of(attention)
    only = len(hooks) == 1 and isinstance(hooks[0], SlidingHook) and "forward" not in vars(attention)
    return hooks[0] if only else None


class WindowHeads:
    """The heads of a window, and those beside them that see the whole row.

    Args:
        attention: a family's module, or SSE beside a window.
        mixer: says how long the window is.
        order: which heads see the whole row; None for none.
        more: other projections of the input.
        norm: of the input.
        dtype: of the model.
    """

    def __init__(
        self,
        attention: Any,
        mixer: WindowMixer,
        order: HeadOrder | None,
        more: dict[str, list[Pair]],
        norm: Norm,
        dtype: torch.dtype,
    ) -> None:
        self._attention, self._mixer, self.order, self._dtype = attention, mixer, order, dtype
        pairs = [projection(attention, f"{key}_proj", dtype) for key in OWN]
        own, whole = _by_order(pairs, order)
        self.projected = Projected({**own, **more, **whole}, norm)
        self._heads = CacheHeads(attention, dtype)

    def takes(self, given: dict[str, Any]) -> bool:
        """Whether the cache is fixed, without padding, and the rotation known."""
        cache, layout = given.get(CACHE), given.get(LAYOUT)
        name = self._attention.config.model._attn_implementation
        if cache is None or layout is None or layout.cache is not cache or current_shard() is not None:
            return False
        kept = self._kept(given)
        fixed = isinstance(kept, SlidingCacheLayer) and kept.is_static and kept.is_initialized and not kept.padded
        if not fixed or kept.dtype != self._dtype or name not in MASKED_ATTENTION:
            return False
        return self._heads.knows_rotation(given) and (self.order is None or self._heads.takes(kept.whole, given))

    def __call__(self, projected: Tensor, given: dict[str, Any]) -> Tensor:
        """[B, Hq, D] of the heads with a window."""
        from sse_convert.kernels.triton.generation.ring_attention import ring_attention

        kept, mixer = self._kept(given), self._mixer
        q, k, v = self._heads.placed(*self.projected.heads(projected, OWN), given)
        ring: TokenRing = kept.ring(TokenRing, functools.partial(TokenRing, seen=kept.seen))
        o: Tensor = ring_attention(
            q, k, v, ring.rows, ring.slots, kept.seen.expand(len(q)),
            window=mixer.window, sinks=mixer.sinks, scale=self._attention.scaling, soft_cap=None,
        )  # fmt: skip
        kept.seen.add_(1)
        return o

    def joined(self, others: Tensor, projected: Tensor, given: dict[str, Any]) -> Tensor:
        """[B, Hq * D] of all heads, in the family's order."""
        if self.order is None:
            return others.flatten(1)
        name = self._attention.config.model._attn_implementation
        own = self.projected.heads(projected, WHOLE)
        whole = self._heads.attended(*own, self._kept(given).whole, given, name)
        return self.order.joined(whole, others, 1).flatten(1)

    def _kept(self, given: dict[str, Any]) -> Any:
        return given[CACHE].layers[self._attention.layer_idx]


class WindowPart:
    """A window alone."""

    def __init__(self, attention: Any, hook: SlidingHook, norm: Norm, dtype: torch.dtype) -> None:
        self._window = WindowHeads(attention, hook.mixer, hook.order, {}, norm, dtype)
        self._output = projection(attention, "o_proj", dtype)

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: of rows without padding, over a fixed cache."""
        if not self._window.takes(given):
            return None
        projected = self._window.projected(x)
        heads = self._window.joined(self._window(projected, given), projected, given)
        return added(heads, self._output, x)


class WindowStatePart:
    """SSE beside a window."""

    def __init__(self, attention: SSESlidingAttention, norm: Norm, dtype: torch.dtype) -> None:
        more = new_projections(attention, dtype)
        self._window = WindowHeads(attention, attention.mixer, attention.order, more, norm, dtype)
        self._state = StateHeads(attention, self._window.projected, dtype)
        self._scale = plain_tensor(attention.sse_window_scale, attention.sse_window_scale.dtype, "sse_window_scale")
        self._output = projection(attention, attention.spec.output, dtype)

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: of rows without padding, each with a state, over a fixed cache."""
        if not (self._window.takes(given) and self._state.takes(given)):
            return None
        projected = self._window.projected(x)
        window, state = self._window(projected, given), self._state(projected, given)
        if self._window.order is None:
            return self._state.added(state, self._output, x, (window, self._scale))
        both = self._state.joined(state, window, self._scale)
        return added(self._window.joined(both, projected, given), self._output, x)


def _by_order(pairs: list[Pair], order: HeadOrder | None) -> tuple[dict[str, list[Pair]], dict[str, list[Pair]]]:
    """Projections of q, k and v of heads with a window, and of those that see the whole row: views, head by head."""
    if order is None:
        return {key: [pair] for key, pair in zip(OWN, pairs, strict=True)}, {}
    own: dict[str, list[Pair]] = {}
    whole: dict[str, list[Pair]] = {}
    for key, name, (weight, bias) in zip(OWN, WHOLE, pairs, strict=True):
        heads = len(order.heads)
        biases: Any = [None] * heads if bias is None else bias.chunk(heads)
        parts = list(zip(weight.chunk(heads), biases, strict=True))
        whole[name] = [parts[head] for head in order.heads[: order.full]]
        own[key] = [parts[head] for head in order.heads[order.full :]]
    return own, whole
