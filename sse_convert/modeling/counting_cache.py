"""What the cache layers of converted layers share: how many tokens they have seen, and how transformers is told.

All serve dynamic and static caches: their tensors have static shapes, so the modes differ only in whether tensors are
replaced or overwritten, and in the token counter (an int, or a tensor with a static address). Towards mask making they
present themselves as full-attention layers, because transformers sizes masks on the first suitable layer of a cache.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sse_convert.errors import UsageError
from sse_convert.modeling.compat import mark_static


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
