"""Cache layers of layers with a window: its keys and values, and beside them the state of SSE in layers of both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.state_cache import CountingLayer, FixedLayer, SSECacheLayer, with_slots

Pair = tuple[Tensor, Tensor]
"""keys and values, each [B, H, columns, D]"""


class KeyRing:
    """The sinks of a window, then a ring of its columns. Softmax does not ask for their order.

    Args:
        sinks: of the window.
        recent: its last window - 1 columns, oldest first.
    """

    def __init__(self, sinks: Pair, recent: Pair) -> None:
        self.sinks = sinks[0].shape[2]
        self.window = recent[0].shape[2] + 1
        self._oldest = self.window - 1
        pairs = zip(sinks, recent, strict=True)
        self._whole = tuple(
            torch.cat([*pair, pair[1].new_empty(*pair[1].shape[:2], 1, pair[1].shape[3])], 2) for pair in pairs
        )

    def put(self, key: Tensor, value: Tensor) -> Pair:
        """Put one token [B, H, 1, D] in the place of the oldest; returns all, [B, H, sinks + window, D]."""
        keys, values = self._whole
        for whole, new in ((keys, key), (values, value)):
            whole.narrow(2, self.sinks + self._oldest, 1).copy_(new)
        self._oldest = (self._oldest + 1) % self.window
        return keys, values

    def stored(self) -> tuple[Pair, Pair]:
        """The sinks and all columns of the ring, as they lie."""
        (keys, values), cut = self._whole, self.sinks
        return (keys[:, :, :cut], values[:, :, :cut]), (keys[:, :, cut:], values[:, :, cut:])

    def in_order(self) -> tuple[Pair, Pair]:
        """The sinks and the last window - 1 columns, oldest first, as the ring was made of."""
        sinks, (keys, values) = self.stored()
        keys, values = (x.roll(-self._oldest, 2)[:, :, 1:] for x in (keys, values))
        return sinks, (keys, values)

    def is_writable(self) -> bool:
        """Whether tokens can be put here: tensors of inference mode are not changed outside of it."""
        return torch.is_inference_mode_enabled() or not self._whole[0].is_inference()


class SlidingCacheLayer(CountingLayer):
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
        self.padded = False
        self._ring: Any = None
        self._turns = False

    @property
    def past_columns(self) -> int:
        """Columns kept besides the sinks."""
        return self.window - 1

    def locate_sinks(self, columns: Tensor, padded: bool) -> None:
        """Tell where the sinks are, before `update`.

        Args:
            columns: int64 [B, sinks] column of each row's first real tokens; a large number where not seen yet.
            padded: whether they may be others than the first columns.
        """
        self.sink_columns, self.padded = columns, padded
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
        ring: KeyRing = self.ring(KeyRing, KeyRing)
        self._advance(1)
        return ring.put(key, value)

    def ring(self, kind: Any, make: Callable[[Pair, Pair], Any]) -> Any:
        """What keeps the sinks and the columns in an order of its own, until they are used in theirs.

        Args:
            kind: of ring, with the methods `stored`, `in_order` and `is_writable` of `KeyRing`.
            make: makes one of the sinks and the last window - 1 columns.
        """
        if type(self._ring) is not kind or not self._ring.is_writable():
            self._unwind()
            self._ring = make((self.sink_keys, self.sink_values), (self.keys, self.values))
            self._hold(self._ring.stored())
        return self._ring

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


class JoinedCacheLayer(SlidingCacheLayer):
    """What a layer keeps of which a window is one part: beside its keys and values SSE's state in `recurrent`, and in
    `whole` keys and values of the heads that see the whole row.

    Every change of rows or length is made to all; each counts the tokens that its own part has seen.

    Args:
        window: of the part with a window.
        sinks: of it.
        state: whether there is a state.
        full: whether some heads see the whole row.
        static_length: columns of a static cache; None for a dynamic one.
    """

    def __init__(self, *, window: int, sinks: int, state: bool, full: bool, static_length: int | None = None) -> None:
        super().__init__(window=window, sinks=sinks, static_length=static_length)
        self.recurrent = SSECacheLayer(static_length=static_length) if state else None
        self.whole: Any = None
        if full:
            self.whole = RoomyLayer() if static_length is None else FixedLayer(static_length)

    def _beside(self) -> list[Any]:
        return [part for part in (self.recurrent, self.whole) if part is not None]

    def fix(self, slots: int) -> None:
        """From now on keep the tensors where they are, as a static cache of `slots` columns does."""
        if self.whole is not None:
            self.whole = with_slots(self.whole, slots, self.seen)
        super().fix(slots)
        if self.recurrent is not None:
            self.recurrent.fix(slots)

    def release(self, length: int) -> None:
        """Be a dynamic layer again, of `length` columns."""
        super().release(length)
        if self.recurrent is not None:
            self.recurrent.release(length)
        if self.whole is not None:
            fixed, self.whole = self.whole, RoomyLayer()
            self.whole.update(fixed.keys[:, :, :length], fixed.values[:, :, :length])

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take tokens back.

        Raises:
            UsageError: the cache is static.
        """
        super().activate_past_recording()
        if self.recurrent is not None:
            self.recurrent.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens; 0 forgets what was recorded."""
        super().crop(tokens_to_remove)
        for part in self._beside():
            part.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        for part in self._beside():
            part.reset()

    def offload(self) -> None:
        """Move to the CPU."""
        super().offload()
        for part in self._beside():
            part.offload()

    def prefetch(self) -> None:
        """Move back."""
        super().prefetch()
        for part in self._beside():
            part.prefetch()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the past of row beam_idx[row]."""
        super().batch_select_indices(beam_idx)
        for part in self._beside():
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        for part in self._beside():
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        for part in self._beside():
            part.batch_select_indices(indices)
