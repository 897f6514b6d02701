"""The cache layer of an SSE layer: its state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from sse_convert.errors import UsageError
from sse_convert.modeling.counting_cache import CountingLayer
from sse_convert.modeling.token_step import StepKeeper

Replay = Callable[[Tensor, int], Tensor]
"""(state before a forward, tokens to keep of each row) -> state after them"""


class SSECacheLayer(LinearAttentionCacheLayerMixin, CountingLayer):
    """The recurrent state of one SSE layer, [B, partitions, H, D, V] in float32 (float64 in a float64 model)."""

    is_compileable = CountingLayer.is_compileable
    is_croppable = True

    def __init__(self, *, static_length: int | None = None) -> None:
        CountingLayer.__init__(self, static_length=static_length)
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
