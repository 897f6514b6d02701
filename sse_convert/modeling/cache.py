"""Cache layers of converted layers, swapped into whatever transformers `Cache` arrives.

All serve dynamic and static caches: their tensors have static shapes, so the modes differ only in whether tensors are
replaced or overwritten, and in the token counter (an int, or a tensor with a static address). Towards mask making they
present themselves as full-attention layers, because transformers sizes masks on the first suitable layer of a cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
)

from sse_convert.errors import UsageError
from sse_convert.modeling.compat import mark_static
from sse_convert.modeling.key_ring import KeyRing, Pair
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.token_step import StepKeeper

Replay = Callable[[Tensor, int], Tensor]
"""(state before a forward, tokens to keep of each row) -> state after them"""


class _CountingLayer(CacheLayerMixin):
    """What all cache layers share: the token counter and how it shows to transformers."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, *, static_length: int | None = None) -> None:
        super().__init__()
        self.static_length = static_length
        self.seen: Any = 0 if static_length is None else torch.tensor(0)
        self.record_past = False

    @property
    def is_static(self) -> bool:
        return self.static_length is not None

    @property
    def is_compileable(self) -> bool:
        """Whether a one-token step keeps all shapes; also what makes transformers mask the unfilled slots of a step."""
        return self.is_static

    def get_seq_length(self) -> Any:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        return (self.static_length if self.is_static else self.seen + query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take tokens back."""
        self.record_past = True

    def _advance(self, tokens: int) -> None:
        if self.is_static:
            self.seen.add_(tokens)
        else:
            self.seen += tokens

    def _reset_counter(self) -> None:
        if self.is_static:
            self.seen.zero_()
        else:
            self.seen = 0

    def fix(self, slots: int) -> None:
        """From now on keep the tensors where they are, as a static cache of `slots` columns does."""
        self.static_length = slots
        self.seen = torch.tensor(self.seen)
        self._make_static(*self._tensors())

    def release(self, length: int) -> None:
        """Be a dynamic layer again, of `length` columns."""
        self.static_length, self.seen = None, length

    def _tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def _make_static(self, *tensors: Tensor) -> None:
        self.seen = self.seen.to(tensors[0].device)
        if not torch.compiler.is_compiling():
            for tensor in (self.seen, *tensors):
                mark_static(tensor)

    def _removed(self, tokens_to_remove: int) -> int:
        if tokens_to_remove > 0:
            raise UsageError(
                f"crop({tokens_to_remove})",
                expected="0, or a negative number of tokens to take back",
                fix="crop(length - cache.get_seq_length())",
            )
        if tokens_to_remove < 0 and not self.record_past:
            raise UsageError(
                f"crop({tokens_to_remove}) of a cache that does not record its past",
                expected="a cache that records, since recurrent states and windows cannot be rolled back otherwise",
                fix="call cache.activate_past_recording() before the forward pass whose tokens may be taken back",
            )
        return -tokens_to_remove


class SSECacheLayer(LinearAttentionCacheLayerMixin, _CountingLayer):
    """The recurrent state of one SSE layer, [B, partitions, H, D, V] in float32 (float64 in a float64 model)."""

    is_compileable = _CountingLayer.is_compileable
    is_croppable = True

    def __init__(self, *, static_length: int | None = None) -> None:
        _CountingLayer.__init__(self, static_length=static_length)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=1)
        self._past: list[tuple[int, Tensor, Replay]] = []
        self.step = StepKeeper()

    @property
    def state(self) -> Tensor | None:
        """The state, or None before the first token."""
        return self.recurrent_states[0] if self.has_previous_state[0] else None

    def write(self, state: Tensor, tokens: int, replay: Replay | None) -> None:
        """Store the state after `tokens` more tokens per row (padding included).

        Args:
            state: [B, partitions, H, D, V]; the layer's own tensor if it was overwritten in place.
            tokens: columns that the forward added.
            replay: recomputes the state after fewer of them, from the state before; kept, and needed, only while
                recording.
        """
        if not self.is_recurrent_states_initialized[0]:
            self.lazy_initialization(state)
        if self.record_past:
            assert replay is not None
            self._past.append((tokens, self.recurrent_states[0].clone(), replay))
        if state is not self.recurrent_states[0]:
            self._restore(state)
        self.has_previous_state[0] = True
        self._advance(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens; 0 forgets what was recorded."""
        remove = self._removed(tokens_to_remove)
        if remove > (recorded := sum(tokens for tokens, _, _ in self._past)):
            raise UsageError(f"crop({-remove}) after {recorded} recorded tokens", expected="at most what was recorded")
        kept = -remove
        while remove > 0:
            tokens, before, replay = self._past.pop()
            self._restore(before if tokens <= remove else replay(before, tokens - remove))
            remove -= tokens
        self._past.clear()
        if kept:
            self._advance(kept)

    def _tensors(self) -> list[Tensor]:
        return [self.recurrent_states[0]]

    def _restore(self, state: Tensor) -> None:
        if self.is_static:
            self.recurrent_states[0].copy_(state)
        else:
            self.recurrent_states[0] = state

    def lazy_initialization(self, state: Tensor, *args: Any, **kwargs: Any) -> None:
        """Allocate a state like the given one."""
        self.dtype, self.device = state.dtype, state.device
        self.recurrent_states[0] = torch.zeros_like(state)
        if self.is_static:
            self._make_static(*self._tensors())
        self.is_recurrent_states_initialized[0] = True
        self.is_initialized = True

    def reset(self) -> None:
        """Forget all tokens."""
        if self.is_initialized:
            self.recurrent_states[0].zero_()
        self.has_previous_state[0] = False
        self._past.clear()
        self._reset_counter()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the past of row beam_idx[row]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized:
            self.recurrent_states[0] = self.recurrent_states[0].repeat_interleave(repeats, dim=0)
        self._past.clear()  # rows moved: what was recorded can no longer be taken back

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        if self.is_initialized:
            self.recurrent_states[0] = self.recurrent_states[0][indices.to(self.device)]
        self._past.clear()

    def update(self, key_states: Tensor | None, value_states: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Not for this layer, except with (None, None), by which a gathered cache is rebuilt."""
        if key_states is None and value_states is None:
            return None, None
        raise RuntimeError("an SSE layer keeps no keys and values")

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Not for this layer."""
        raise RuntimeError("an SSE layer has no convolution")

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Not for this layer."""
        raise RuntimeError("an SSE layer's state is stored with `write`")


class SlidingCacheLayer(_CountingLayer):
    """Keys and values of one sliding layer: the first `sinks` real tokens of each row and the last window - 1 columns.

    `update` returns [sinks, window - 1 columns, new tokens]; `sliding.cached_sees` says which of them a query sees, so
    sinks that are still inside the window, and slots not yet filled, count once or not at all. A single token that sees
    them all may turn a ring instead (`turn`), which moves no other token; any other use puts the columns in order.
    """

    def __init__(self, *, window: int, sinks: int, static_length: int | None = None) -> None:
        super().__init__(static_length=static_length)
        self.window = window
        self.sinks = sinks
        self.sink_columns: Tensor | None = None
        self.sink_keys: Any = None
        self.sink_values: Any = None
        self._ring: KeyRing | None = None
        self._turns = False

    @property
    def past_columns(self) -> int:
        """Columns kept besides the sinks."""
        return self.window - 1

    def locate_sinks(self, columns: Tensor) -> None:
        """Tell where the sinks are, before `update`.

        Args:
            columns: int64 [B, sinks] column of each row's first real tokens; a large number where not seen yet.
        """
        self.sink_columns = columns
        self._turns = False

    def turn(self) -> None:
        """Tell, before `update`, that it brings one token, which sees all that is kept, in any order: full windows
        without padding, and sinks that have left them."""
        self._turns = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch, heads and dims of the given keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads = key_states.shape[:2]

        def zeros(length: int, like: Tensor) -> Tensor:
            return like.new_zeros(batch, heads, length, like.shape[-1])

        self.keys, self.values = zeros(self.past_columns, key_states), zeros(self.past_columns, value_states)
        self.sink_keys, self.sink_values = zeros(self.sinks, key_states), zeros(self.sinks, value_states)
        if self.is_static:
            self._make_static(*self._tensors())
        self.is_initialized = True

    def _tensors(self) -> list[Tensor]:
        self._unwind()
        return [self.keys, self.values, self.sink_keys, self.sink_values]

    def update(
        self, key_states: Tensor | None, value_states: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Add new tokens; returns keys and values [B, H, sinks + window - 1 + T, D]."""
        if key_states is None or value_states is None:
            return None, None  # how a cache is rebuilt after a gather
        if self._turns:
            return self._turned(key_states, value_states)
        self._unwind()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        visible = self.past_columns + key_states.shape[2]
        recent_keys, recent_values = keys[:, :, -visible:], values[:, :, -visible:]
        self._collect_sinks(recent_keys, recent_values)
        first = 0 if self.record_past else keys.shape[2] - self.past_columns
        self._store(keys[:, :, first:], values[:, :, first:], alone=key_states.shape[2] > 1)
        self._advance(key_states.shape[2])
        return (
            torch.cat([self.sink_keys, recent_keys], 2),
            torch.cat([self.sink_values, recent_values], 2),
        )

    def _turned(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._ring is None or not self._ring.is_writable():
            self._unwind()
            self._ring = KeyRing((self.sink_keys, self.sink_values), (self.keys, self.values))
            self._hold(self._ring.stored())
        self._advance(1)
        return self._ring.put(key, value)

    def _unwind(self) -> None:
        """Put the columns in order."""
        if self._ring is not None:
            self._hold(self._ring.in_order())
            self._ring = None

    def _hold(self, sinks_and_recent: tuple[Pair, Pair]) -> None:
        (self.sink_keys, self.sink_values), (self.keys, self.values) = sinks_and_recent

    def _collect_sinks(self, keys: Tensor, values: Tensor) -> None:
        """Copy the sinks that lie in the columns at hand (the first of which is seen - window + 1)."""
        if self.sinks == 0:
            return
        if self.sink_columns is None:
            raise RuntimeError("the sinks of a sliding layer must be located before its update")
        index = self.sink_columns.to(self.device) - (self.seen - self.past_columns)
        here = ((index >= 0) & (index < keys.shape[2]))[:, None, :, None]
        index = index.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        for name, new in (("sink_keys", keys), ("sink_values", values)):
            found = new.gather(2, index.expand(-1, new.shape[1], -1, new.shape[-1]))
            self._put(name, torch.where(here, found, getattr(self, name)))

    def _store(self, keys: Tensor, values: Tensor, *, alone: bool = False) -> None:
        """Keep columns; `alone`: in memory of their own, so that what they were cut from is freed."""
        if alone and not self.is_static:
            keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
        self._put("keys", keys)
        self._put("values", values)

    def _put(self, name: str, tensor: Tensor) -> None:
        if self.is_static:
            getattr(self, name).copy_(tensor)
        else:
            setattr(self, name, tensor)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take tokens back.

        Raises:
            UsageError: the cache is static.
        """
        if self.is_static:
            raise UsageError(
                "a static cache cannot take tokens back from sliding layers",
                expected="a dynamic cache",
                fix="leave cache_implementation unset for assisted decoding",
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens; 0 forgets what was recorded."""
        remove = self._removed(tokens_to_remove)
        if not self.is_initialized:
            return
        self._unwind()
        end = self.keys.shape[2] - remove
        if end < self.past_columns:
            recorded = self.keys.shape[2] - self.past_columns
            raise UsageError(f"crop({-remove}) after {recorded} recorded tokens", expected="at most what was recorded")
        kept = slice(end - self.past_columns, end)
        self._store(self.keys[:, :, kept], self.values[:, :, kept])
        if remove:
            self._advance(-remove)

    def reset(self) -> None:
        """Forget all tokens."""
        if self.is_initialized:
            self._unwind()
            for tensor in (self.keys, self.values, self.sink_keys, self.sink_values):
                tensor.zero_()
            self._store(self.keys[:, :, : self.past_columns], self.values[:, :, : self.past_columns])
        self.sink_columns = None
        self._reset_counter()

    def _each_tensor(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self._unwind()
            self.keys, self.values = change(self.keys), change(self.values)
            self.sink_keys, self.sink_values = change(self.sink_keys), change(self.sink_values)

    def offload(self) -> None:
        """Move to the CPU."""
        self._each_tensor(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back."""
        self._each_tensor(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the past of row beam_idx[row]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._each_tensor(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._each_tensor(lambda tensor: tensor[indices.to(tensor.device)])


class SSESlidingCacheLayer(SlidingCacheLayer):
    """What a layer with both branches keeps: the window's keys and values, and beside them SSE's state in `recurrent`.

    Every change of rows or length is made to both; each counts the tokens that its own branch has seen.
    """

    def __init__(self, *, window: int, sinks: int, static_length: int | None = None) -> None:
        super().__init__(window=window, sinks=sinks, static_length=static_length)
        self.recurrent = SSECacheLayer(static_length=static_length)

    def fix(self, slots: int) -> None:
        """From now on keep the tensors where they are, as a static cache of `slots` columns does."""
        super().fix(slots)
        self.recurrent.fix(slots)

    def release(self, length: int) -> None:
        """Be a dynamic layer again, of `length` columns."""
        super().release(length)
        self.recurrent.release(length)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take tokens back.

        Raises:
            UsageError: the cache is static.
        """
        super().activate_past_recording()
        self.recurrent.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens; 0 forgets what was recorded."""
        super().crop(tokens_to_remove)
        self.recurrent.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.recurrent.reset()

    def offload(self) -> None:
        """Move to the CPU."""
        super().offload()
        self.recurrent.offload()

    def prefetch(self) -> None:
        """Move back."""
        super().prefetch()
        self.recurrent.prefetch()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self.recurrent.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        self.recurrent.batch_select_indices(indices)


def counting_layer(cache: Any) -> Any:
    """A layer of a converted model in the cache, which knows the length; None if there is no cache or no such layer."""
    layers = [] if cache is None else cache.layers
    return next((layer for layer in layers if isinstance(layer, _CountingLayer)), None)


def install(cache: Any, config: Any, sse_layers: list[int], windows: dict[int, tuple[int, int]]) -> None:
    """Swap the layers of a fresh cache for those that converted layers need, and the others' for such as have room on a
    CPU. Does nothing the second time.

    Args:
        cache: any transformers cache, or None.
        config: the model's configuration.
        sse_layers: indices of SSE layers.
        windows: index of each layer with a window -> (window, sinks); those of both kinds are in both arguments.

    Raises:
        UsageError: the cache is not a `Cache`, or already holds keys of a converted layer.
    """
    if cache is None or getattr(cache, "_sse_installed", False):
        return
    if not isinstance(cache, Cache):
        raise UsageError(
            f"past_key_values is a {type(cache).__name__}",
            expected="a transformers Cache",
            fix="pass DynamicCache(config=model.config), or leave it out",
        )
    if cache.layer_class_to_replicate is not None and not cache.layers:
        cache.layers.extend(DynamicCache(config=config).layers)
    is_static = isinstance(cache, StaticCache)
    lengths = [getattr(layer, "max_cache_len", None) or 0 for layer in cache.layers]
    static_length = max(lengths) if is_static else None
    for index in (*sse_layers, *windows):
        if getattr(cache.layers[index], "is_initialized", False):
            raise UsageError(
                f"past_key_values already holds keys of layer {index}",
                expected="a fresh cache, or one of this model",
                fix="pass DynamicCache(config=model.config), or leave it out",
            )
    for index in sse_layers:
        cache.layers[index] = SSECacheLayer(static_length=static_length)
    for index, (window, sinks) in windows.items():
        kind = SSESlidingCacheLayer if index in sse_layers else SlidingCacheLayer
        cache.layers[index] = kind(window=window, sinks=sinks, static_length=static_length)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = RoomyLayer()
    cache._sse_installed = True
