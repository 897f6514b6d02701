"""The SSE layer of an engine: the project's own layer over states that live in rows of the engine's memory."""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.state_slots import clear_states
from sse_convert.mixers import SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import ArchSpec, AttentionDims
from sse_convert.modeling.initialise import precise_dtype
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.tensors import ROUTER_BIAS, state_shape
from sse_convert.serving.batch import Batch
from sse_convert.serving.ring import Window, window_rows, window_steps


def state_shapes(dims: AttentionDims, mixer: SSEMixer) -> tuple[tuple[int, ...], ...]:
    """What one request keeps of a layer: the state [partitions, H, D, V], and with a window its ring.

    Args:
        dims: sizes of the layer, or of the part of it that one device has.
        mixer: its settings.
    """
    shapes: tuple[tuple[int, ...], ...] = (state_shape(dims, mixer),)
    if isinstance(mixer, SSESlidingMixer):
        shapes += (Window(window=mixer.window, sinks=mixer.sinks, scale=1.0).shape(dims.kv_heads, dims.head_dim),)
    return shapes


class ServedAttention(SSEAttention):
    """An SSE layer, with or without a window, whose requests' states are rows of tensors that somebody else owns.

    Args:
        source: the attention module whose norms, and projections if it has the family's, are taken over.
        config: of the model, or of the part of its heads that one device has.
        layer_idx: index of the layer.
        spec: the family.
        mixer: settings of the layer.
        rotary: module of (positions [T], q [T, Hq * D], k [T, H * D]) that returns both rotated.
        scale: of the family's softmax.
        soft_cap: of the family's softmax; None for none.
    """

    def __init__(
        self,
        source: nn.Module,
        config: Any,
        layer_idx: int,
        *,
        spec: ArchSpec,
        mixer: SSEMixer,
        rotary: nn.Module,
        scale: float,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(source, config, layer_idx, spec=spec, mixer=mixer)
        self.rotary = rotary
        self.window: Window | None = None
        if isinstance(mixer, SSESlidingMixer):
            self.window = Window(window=mixer.window, sinks=mixer.sinks, scale=scale, soft_cap=soft_cap)
        if ROUTER_BIAS in self._buffers:  # engines load parameters
            bias = self._buffers.pop(ROUTER_BIAS)
            self.register_parameter(ROUTER_BIAS, nn.Parameter(bias, requires_grad=False))

    @torch.no_grad()
    def attend(
        self,
        x: Tensor,
        projected: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        batch: Batch,
        pages: tuple[Tensor, ...],
    ) -> Tensor:
        """The heads [T, Hq * D] before the output projection, in x's dtype.

        Args:
            x: [T, hidden], T = batch.tokens.
            projected: q [T, Hq * D], k and v [T, kv heads * D] of x, before norm and rotation.
            positions: integer [T].
            batch: whose tokens they are.
            pages: a tensor [rows, *shape] for each of `state_shapes`; overwritten where requests have their rows.
        """
        for page in pages:
            clear_states(page, batch.slots, batch.past)
        inputs = self.operator_inputs(x, self._rotation_at(positions, x.dtype), projected)
        if inputs["partition_gate"] is not None:
            inputs["positions"] = positions.long()
        o = torch.cat([self._recur(inputs, part, first, pages[0]) for first, part in _parts(batch)])
        if self.window is None:
            return self.scaled(o, x, x.dtype)
        heads = self.scaled(o, x, precise_dtype(x))
        return self._beside(heads, self._in_window(self.window, projected, positions, batch, pages[1]))

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

    def _in_window(
        self, window: Window, projected: tuple[Tensor, Tensor, Tensor], positions: Tensor, batch: Batch, rows: Tensor
    ) -> Tensor:
        """[T, Hq, D] of softmax attention in the window."""
        dims = self.dims
        q, k = (
            self._placed(flat.view(-1, heads, dims.head_dim), which, None).flatten(1)
            for which, (flat, heads) in enumerate(zip(projected, (dims.query_heads, dims.kv_heads), strict=False))
        )
        q, k = self.rotary(positions, q, k)
        q, k, v = (flat.view(flat.shape[0], -1, dims.head_dim) for flat in (q, k, projected[2]))
        found = []
        for first, part in _parts(batch):
            tokens, attend = slice(first, first + part.tokens), window_steps if part.decodes else window_rows
            found.append(attend(window, q[tokens], k[tokens], v[tokens], rows, part))
        return torch.cat(found)

    def _beside(self, heads: Tensor, window: Tensor) -> Tensor:
        """SSE's heads [T, Hq * D] and the window's [T, Hq, D] as [T, Hq * D] of the latter's type."""
        scale = self.sse_window_scale.to(heads.dtype)[:, None]
        return (window.to(heads.dtype) * scale + heads.view(window.shape)).to(window.dtype).flatten(1)

    def _rotation_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) of positions, each [T, 1, rotated dims], where SSE keeps the rotation."""
        if not self.rotates:
            return None
        table: Any = self.rotary.cos_sin_cache
        cos, sin = table[positions.long()].to(dtype).chunk(2, -1)
        return torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]


PER_TOKEN = (
    "q", "k", "v", "log_decay", "router_logits", "shared", "write_strength", "shared_write_strength", "positions",
)  # fmt: skip
"""arguments of the operator that have a row for each token"""


def _of_tokens(value: Any, tokens: slice) -> Any:
    if isinstance(value, tuple):
        return tuple(part[tokens] for part in value)
    return None if value is None else value[tokens]


def _parts(batch: Batch) -> list[tuple[int, Batch]]:
    """First token and batch of the requests with one new token, and of the others; those that there are."""
    parts = ((0, batch.steps(), batch.decodes), (batch.decodes, batch.rows(), batch.prefills))
    return [(first, part) for first, part, requests in parts if requests]
