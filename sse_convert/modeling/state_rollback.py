"""Taking tokens back from a recurrent state: recompute it from the state before them."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.modeling.layout import SequenceLayout

_NO_TOKENS = ("router_bias", "k_scale")


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
        inputs = {name: value if name in _NO_TOKENS else _rows(value, index) for name, value in self._inputs.items()}
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
