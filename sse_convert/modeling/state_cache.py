"""The cache layer of an SSE layer: its state, and taking tokens back from it; and what all cache layers share: how many
tokens they have seen, and how transformers is told.

All serve dynamic and static caches: their tensors have static shapes, so the modes differ only in whether tensors are
replaced or overwritten, and in the token counter (an int, or a tensor with a static address). Towards mask making they
present themselves as full-attention layers, because transformers sizes masks on the first suitable layer of a cache.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from sse_convert.errors import UsageError
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.modeling.compat import mark_static
from sse_convert.modeling.layout import SequenceLayout


class CountingLayer(CacheLayerMixin):
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
        """Whether tensors are overwritten in place."""
        return self.static_length is not None

    @property
    def is_compileable(self) -> bool:
        """Whether a one-token step keeps all shapes; also what makes transformers mask the unfilled slots of a step."""
        return self.is_static

    def get_seq_length(self) -> Any:
        """Tokens seen so far."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Columns of a mask for so many new tokens, and the first of them."""
        return (self.static_length if self.is_static else self.seen + query_length), 0

    def get_max_length(self) -> int:
        """No limit."""
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
        """How many tokens `crop` takes back, as an int also where transformers counts them in a tensor on the GPU."""
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
        return -int(tokens_to_remove)


class FixedLayer(StaticLayer):
    """Takes what comes in another type than it holds: in autocast, rotated keys are wider than values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the base class does."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        given = key_states.to(self.keys.dtype), value_states.to(self.values.dtype)
        held: tuple[Tensor, Tensor] = super().update(*given, *args, **kwargs)
        return held


def with_slots(layer: Any, slots: int, length: int) -> FixedLayer:
    """A layer with a slot for every position, which takes what the given one holds of the last columns of `length`.

    Layers with a window get slots for all positions too: the mask hides what is out of sight.
    """
    fixed = FixedLayer(max_cache_len=slots)
    fixed.lazy_initialization(layer.keys, layer.values)
    held = slice(length - layer.keys.shape[2], length)
    fixed.keys[:, :, held], fixed.values[:, :, held] = layer.keys, layer.values
    fixed.cumulative_length.fill_(length)
    layer.keys = layer.values = None
    return fixed


class Replay:
    """Recomputes the state of a layer after the first tokens of one forward, so that a cache can take back the rest."""

    def __init__(self, inputs: dict[str, Any], layout: SequenceLayout, length: int, backend: str) -> None:
        self._inputs = inputs
        self._layout = layout
        self._length = length
        self._backend = backend

    def __call__(self, state: Tensor, tokens: int) -> Tensor:
        """State after the first `tokens` columns, from the state before the forward."""
        offsets, real = self._layout.cu_seqlens[: self._layout.sequences + 1].tolist(), self._layout.tokens
        columns = (torch.arange(offsets[-1]) if real is None else real[: offsets[-1]].cpu()) % self._length
        kept = columns < tokens
        counts = torch.stack([kept[a:b].sum() for a, b in pairwise(offsets)])
        index = kept.nonzero()[:, 0].to(state.device)
        inputs = {name: value if name == "k_scale" else _rows(value, index) for name, value in self._inputs.items()}
        final = sse_attention(
            **inputs,
            cu_seqlens=F.pad(counts.cumsum(0), (1, 0)),
            initial_state=state,
            output_final_state=True,
            backend=self._backend,
        )[1]
        assert final is not None
        return final


def _rows(value: Any, index: Tensor) -> Any:
    """The rows of some tokens, of a tensor or a tuple of tensors; options as they are."""
    if isinstance(value, tuple):
        return tuple(_rows(part, index) for part in value)
    return value.index_select(0, index) if isinstance(value, Tensor) else value


class SSECacheLayer(LinearAttentionCacheLayerMixin, CountingLayer):
    """The recurrent state of one SSE layer, [B, partitions, H, D, V] in float32 (float64 in a float64 model)."""

    is_compileable = CountingLayer.is_compileable
    is_croppable = True

    def __init__(self, *, static_length: int | None = None) -> None:
        CountingLayer.__init__(self, static_length=static_length)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=1)
        self._past: list[tuple[int, Tensor, Replay]] = []

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
