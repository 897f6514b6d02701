"""Converted layers of an engine: the project's own layers over states that live in rows of the engine's memory."""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.state_slots import clear_states
from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer, SSESlidingMixer
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.initialise import precise_dtype
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.tensors import state_shape
from sse_convert.modeling.window.window_branch import branch_sum
from sse_convert.serving.batch import Batch
from sse_convert.serving.ring import RingWindow, window_rows, window_steps

Projected = tuple[Tensor, Tensor, Tensor]
"""q [T, Hq * D], k and v [T, kv heads * D], before norm and rotation"""
Rotary = Any
"""called with positions [T], q [T, Hq * D] and k [T, H * D]; returns both rotated"""


def state_shapes(dims: AttentionDims, mixer: Mixer) -> tuple[tuple[int, ...], ...]:
    """What one request keeps of a layer: a state [partitions, H, D, V], a window's ring, or both in this order.

    Args:
        dims: sizes of the layer, or of the part of it that one device has.
        mixer: its settings.
    """
    shapes: tuple[tuple[int, ...], ...] = ()
    if isinstance(mixer, SSEMixer):
        shapes += (state_shape(dims, mixer),)
    if isinstance(mixer, SlidingMixer | SSESlidingMixer):
        shapes += (RingWindow(window=mixer.window, sinks=mixer.sinks, scale=1.0).shape(dims.kv_heads, dims.head_dim),)
    return shapes


class ServedSliding(nn.Module):
    """Softmax attention in a window, whose requests' rings are rows of a tensor that somebody else owns.

    Args:
        source: the attention module whose norms are taken over, with its other children.
        dims: its sizes.
        spec: the family.
        window: the window, and how the family computes its softmax.
        rotary: how it rotates.
    """

    def __init__(
        self, source: nn.Module, dims: AttentionDims, *, spec: ArchSpec, window: RingWindow, rotary: Rotary
    ) -> None:
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        self.dims, self.spec, self.window, self.rotary = dims, spec, window, rotary

    @torch.no_grad()
    def attend(
        self, x: Tensor, projected: Projected, positions: Tensor, batch: Batch, pages: tuple[Tensor, ...]
    ) -> Tensor:
        """The heads [T, Hq * D]. For arguments see `ServedAttention.attend`."""
        clear_states(pages[0], batch.slots, batch.past)
        return window_heads(self, self.window, projected, positions, batch, pages[0]).flatten(1)


class ServedAttention(SSEAttention):
    """An SSE layer, with or without a window, whose requests' states are rows of tensors that somebody else owns.

    Args:
        source: the attention module whose norms, and projections if it has the family's, are taken over.
        config: of the model, or of the part of its heads that one device has.
        layer_idx: index of the layer.
        spec: the family.
        mixer: settings of the layer.
        window: the window beside SSE, and how the family computes its softmax; None for none.
        rotary: how the family rotates, for the window.
    """

    rotary: Any
    sse_window_scale: nn.Parameter
    window: RingWindow | None

    def __init__(
        self,
        source: nn.Module,
        config: Any,
        layer_idx: int,
        *,
        spec: ArchSpec,
        mixer: SSEMixer,
        window: RingWindow | None,
        rotary: Rotary,
    ) -> None:
        super().__init__(source, config, layer_idx, spec=spec, mixer=mixer)
        self.window = window
        self.rotary = rotary

    @torch.no_grad()
    def attend(
        self,
        x: Tensor,
        projected: Projected,
        positions: Tensor,
        batch: Batch,
        pages: tuple[Tensor, ...],
    ) -> Tensor:
        """The heads [T, Hq * D] before the output projection, in x's dtype.

        Args:
            x: [T, hidden], T = batch.tokens.
            projected: of x.
            positions: integer [T].
            batch: whose tokens they are.
            pages: a tensor [rows, *shape] for each of `state_shapes`; overwritten where requests have their rows.
        """
        for page in pages:
            clear_states(page, batch.slots, batch.past)
        inputs = self.operator_inputs(x, projected)
        o = _joined([self._recur(inputs, part, first, pages[0]) for first, part in _parts(batch)])
        if self.window is None:
            return self.scaled(o, x.dtype)
        heads = self.scaled(o, precise_dtype(x))
        window = window_heads(self, self.window, projected, positions, batch, pages[1])
        return branch_sum(heads, window, self.sse_window_scale).flatten(1)

    def _recur(self, inputs: dict[str, Any], part: Batch, first: int, states: Tensor) -> Tensor:
        """[tokens of the part, Hq, D] of the operator."""
        tokens = slice(first, first + part.tokens)
        o, _ = sse_attention(
            **{name: _of_tokens(value, tokens) if name in PER_TOKEN else value for name, value in inputs.items()},
            cu_seqlens=part.offsets,
            max_seqlen=1 if part.decodes else None,
            initial_state=states,
            state_slots=part.slots,
            inplace_state=True,
            backend=self.backend,
        )
        return o


def window_heads(
    layer: Any, window: RingWindow, projected: Projected, positions: Tensor, batch: Batch, rows: Tensor
) -> Tensor:
    """[T, Hq, D] of softmax attention in a window.

    Args:
        layer: has the family's norms, `dims`, `spec` and `rotary`.
        window: the window.
        projected: of all tokens.
        positions: [T].
        batch: whose tokens they are.
        rows: the rings; see `ring.window_steps`.
    """
    spec, dim = layer.spec, layer.dims.head_dim
    q, k, v = (flat.reshape(flat.shape[0], -1, dim) for flat in projected)
    if spec.qk_norm == "head":
        q, k = (getattr(layer, name)(heads) for name, heads in zip(spec.qk_norms, (q, k), strict=True))
    q, k = (flat.view(v.shape[0], -1, dim) for flat in layer.rotary(positions, q.flatten(1), k.flatten(1)))
    found = []
    for first, part in _parts(batch):
        tokens, attend = slice(first, first + part.tokens), window_steps if part.decodes else window_rows
        found.append(attend(window, q[tokens], k[tokens], v[tokens], rows, part))
    return _joined(found)


PER_TOKEN = (
    "q", "k", "v", "log_decay", "router_logits", "shared", "write_strength", "shared_write_strength",
)  # fmt: skip
"""arguments of the operator that have a row for each token"""


def _of_tokens(value: Any, tokens: slice) -> Any:
    if isinstance(value, tuple):
        return tuple(part[tokens] for part in value)
    return None if value is None else value[tokens]


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parts(batch: Batch) -> list[tuple[int, Batch]]:
    """First token and batch of the requests with one new token, and of the others; those that there are."""
    parts = [(0, batch.steps())] if batch.decodes else []
    return [*parts, (batch.decodes, batch.rows())] if batch.prefills else parts
