"""SSE attention in place of a family's softmax attention: the teacher's projections, a few new tensors, the operator.

Order: projection (+ low-rank side path) -> the source's q/k norm -> operator (feature map on k, log
decays of gate logits, scale D^-1/2, write strengths under the delta rule) -> per-head RMS norm * sse_out_scale ->
output projection.

Latent attention gives its per-head q, k and v as other families do, by its own low-rank projections.

Shape letters: B batch, T packed tokens (padding dropped), Hq query heads, H state heads, D key dim, V value dim,
N partitions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.torch_modes import traced
from sse_convert.kernels.triton_backend import GPU, fuses, too_wide, unavailable_reason
from sse_convert.mixers import DECAY_NORMALIZER, SSEMixer
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.compat import CACHE
from sse_convert.modeling.context import current_shard, operator_heads
from sse_convert.modeling.initialise import (
    NORM_EPS,
    NewProjection,
    keeps_precision,
    precise_dtype,
)
from sse_convert.modeling.layout import SequenceLayout, handed_cache
from sse_convert.modeling.projections import is_rotated, projections, split_last, value_heads
from sse_convert.modeling.router import RoutedLayer
from sse_convert.modeling.state_cache import Replay, SSECacheLayer
from sse_convert.modeling.tensors import state_heads
from sse_convert.modeling.window.window_attention import HeadOrder


class SSEAttention(RoutedLayer):
    """Replaces one attention module; takes over its children under their names, so state-dict keys stay the source's.

    Args:
        source: the attention module whose projections and norms are used.
        config: the model's configuration.
        layer_idx: index of the layer.
        spec: the family.
        mixer: settings of the layer.
        backend: operator backend.
    """

    cache_argument = CACHE
    """what the family calls the cache among this module's arguments"""
    order: HeadOrder | None = None
    """where some heads see the whole row: which"""
    sse_out_scale: nn.Parameter
    sse_k_scale: nn.Parameter
    sse_delta_q_down: NewProjection
    sse_delta_q_up: NewProjection
    sse_delta_k_down: NewProjection
    sse_delta_k_up: NewProjection

    def __init__(
        self,
        source: nn.Module,
        config: Any,
        layer_idx: int,
        *,
        spec: ArchSpec,
        mixer: SSEMixer,
        backend: str = "auto",
    ) -> None:
        dims = attention_dims(config, layer_idx)
        super().__init__(dims, mixer, layer_idx)
        for name, child in source.named_children():
            self.add_module(name, child)
        for name in spec.softmax_parameters:
            self.keep_for_softmax(name, getattr(source, name))
        self.spec = spec.of(config, rotated=is_rotated(source, spec), own_values=dims.own_values)
        self.backend = backend
        self.state_heads = state_heads(dims, mixer)
        self.output_dropout = getattr(config, spec.output_dropout) if spec.output_dropout else 0.0

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        sse_layout: SequenceLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What decoder layers call.

        Args:
            hidden_states: [B, tokens, hidden].
            position_embeddings: of softmax attention; the states of SSE know the order of their tokens.
            sse_layout: made by the backbone; says which tokens are real and where sequences begin.
            kwargs: the cache, and what only softmax attention needs.

        Returns:
            [B, tokens, hidden], zeros in the padding, and None for the attention weights.

        Raises:
            UsageError: no `sse_layout` arrived, or another cache than the one it names.
        """
        dtype = hidden_states.dtype
        heads, layout = self.heads(hidden_states, sse_layout, kwargs, dtype)
        branch = getattr(self, self.spec.output)(self.gated(heads, layout.pack(hidden_states)))
        if self.output_dropout:
            branch = F.dropout(branch, self.output_dropout, self.training)
        return layout.unpack(branch, *hidden_states.shape[:2]), None

    def heads(
        self,
        hidden_states: Tensor,
        sse_layout: SequenceLayout | None,
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        projected: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, SequenceLayout]:
        """The heads [T, Hq * V] before the output projection, normed and scaled, in `dtype`, and the layout. For other
        arguments and errors see `forward` and `operator_inputs`."""
        kept = self.kept(sse_layout, kwargs)
        assert sse_layout is not None
        inputs = self.operator_inputs(sse_layout.pack(hidden_states), projected)
        shard = current_shard()
        if shard is not None:
            inputs = operator_heads(inputs, shard)
        self.remember(inputs["router_logits"], sse_layout.real)
        o = self.run_operator(inputs, sse_layout, kept, hidden_states.shape[1])
        return self.scaled(o if shard is None else shard.to_rows(o), dtype), sse_layout

    def keep_for_softmax(self, name: str, parameter: nn.Parameter) -> None:
        """Hold a parameter that only softmax uses: here it is data, which travels."""
        self.register_buffer(name, parameter.detach())

    def kept(self, layout: SequenceLayout | None, arguments: dict[str, Any]) -> SSECacheLayer | None:
        """What holds the state; None without a cache. Errors as of `handed_cache`."""
        cache = handed_cache(arguments, self.cache_argument, layout, self.layer_idx)
        return None if cache is None else self.state_layer(cache)

    def state_layer(self, cache: Any) -> SSECacheLayer:
        """The layer of the cache that holds the state."""
        layer: SSECacheLayer = cache.layers[self.layer_idx]
        return layer

    def operator_inputs(self, x: Tensor, projected: tuple[Tensor, Tensor, Tensor] | None = None) -> dict[str, Any]:
        """Everything `sse_attention` needs of T tokens, except sequences and states.

        Args:
            x: [T, hidden].
            projected: what `project` makes of x, where that is known; None to project here.
        """
        mixer = self.mixer
        flat_q, flat_k, flat_v = self.project(x) if projected is None else projected
        side = self._side_path(x)
        groups = self.groups(flat_k)
        q, k = self.queries(flat_q), self.keys(groups)
        precise = x if keeps_precision(x) else x.to(precise_dtype(x))
        log_decay = self._log_decay(precise, "sse_decay")
        shared: tuple[Tensor, ...] | None = None
        if mixer.shared_partition:
            shared_q, shared_k = q, k
            if side is not None:
                shared_q = self.queries(flat_q + side[0])
                shared_k = self.keys(groups + self.groups(side[1]))
            own_decay = mixer.decay_params == "separate"
            shared_decay = self._log_decay(precise, "sse_shared_decay") if own_decay else log_decay
            shared = (shared_q, shared_k, shared_decay)
        logits = self.router_logits(precise)
        v = self.values(flat_v)
        if mixer.num_partitions > 1 and not (mixer.gate.write or mixer.gate.read):
            v = v + (0 * logits.sum()).to(v.dtype)  # e is not used: a zero gradient for the router, which DDP waits for
        return {
            "q": q,
            "k": k,
            "v": v,
            "log_decay": log_decay,
            "router_logits": logits,
            "shared": shared,
            "write_strength": self._write_strength(precise, "sse_write_strength"),
            "shared_write_strength": self._write_strength(precise, "sse_shared_write_strength"),
            **self.mapping_options(),
            **self.routing_options(),
        }

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's q [T, Hq*D], k [T, kv heads * D] and v [T, kv heads * V], before their norms."""
        return projections(self, self.spec, self.source_dims, x)

    def gated(self, heads: Tensor, x: Tensor) -> Tensor:
        """Heads [T, Hq * V] under the source's own gate of x [T, hidden]; as they are in families without one."""
        if not self.spec.gated:
            return heads
        projected = split_last(getattr(self, self.spec.qkv[0])(x), self.dims.query_heads, 2, self.dims.head_dim)
        return heads * torch.sigmoid(projected.select(-2, 1).flatten(-2)).to(heads.dtype)

    def scaled(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """o [T, Hq, V] normed per head and scaled, as heads [T, Hq * V] in `dtype`."""
        if fuses(o):
            from sse_convert.kernels.triton.generation.norm import rms_norm

            normed: Tensor = rms_norm(o, self.sse_out_scale, NORM_EPS, False, 0.0, dtype)
            return normed.flatten(1).to(dtype)
        y = o.to(precise_dtype(o))
        y = F.rms_norm(y, y.shape[-1:], eps=NORM_EPS)
        return (y.flatten(1) * self.sse_out_scale.to(y.dtype)).to(dtype)

    def run_operator(
        self, inputs: dict[str, Any], layout: SequenceLayout, layer: SSECacheLayer | None, length: int
    ) -> Tensor:
        """o [T, Hq, V] of the operator's inputs; with a cache layer from its state on, which then holds the next.

        Args:
            inputs: as `operator_inputs` gives them.
            layout: of the batch.
            layer: of the cache, or None.
            length: tokens of each row.
        """
        sequences: dict[str, Any] = {
            "cu_seqlens": layout.cu_seqlens.to(inputs["q"].device),
            "max_seqlen": layout.max_seqlen,
            "backend": self.backend,
        }
        if layer is None:
            return sse_attention(**inputs, **sequences)[0]
        state, padded = layer.state, layout.real is not None
        o, final = sse_attention(
            **inputs,
            **sequences,
            initial_state=state if state is None or not padded else torch.cat([state, torch.zeros_like(state[:1])]),
            output_final_state=True,
            inplace_state=not padded and self._may_overwrite(state, layer.record_past),
        )
        assert final is not None
        layer.write(final[: layout.sequences], length, Replay(inputs, layout, length, self.backend))
        return o

    @staticmethod
    def _may_overwrite(state: Tensor | None, recording: bool) -> bool:
        if state is None or recording or torch.is_grad_enabled():
            return False
        return traced() or not state.is_inference() or torch.is_inference_mode_enabled()

    def _side_path(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """What is added to q [T, Hq*D] and to k [T, H*D]."""
        if not self.mixer.qk_rank:
            return None
        return self.sse_delta_q_up(self.sse_delta_q_down(x)), self.sse_delta_k_up(self.sse_delta_k_down(x))

    def groups(self, flat: Tensor) -> Tensor:
        """[..., kv heads, keys that each has, D] of projected keys."""
        heads, dim = self.dims.kv_heads, self.dims.head_dim
        return split_last(flat, heads, flat.shape[-1] // (heads * dim), dim)

    def queries(self, flat: Tensor) -> Tensor:
        """q [T, Hq, D] of projections."""
        if self.spec.qk_norm == "whole":
            flat = self._norm(0)(flat)
        return self._normed(split_last(flat, self.dims.query_heads, self.dims.head_dim), 0)

    def keys(self, k: Tensor) -> Tensor:
        """k [T, H, D] for the operator to map, of `groups`."""
        if self.spec.qk_norm == "whole":
            whole = self._norm(1)(k.transpose(-3, -2).flatten(-2))
            k = split_last(whole, self.dims.kv_heads, self.dims.head_dim).transpose(-3, -2)
        return self._per_state_head(self._normed(k.flatten(-3, -2), 1))

    def _norm(self, which: int) -> nn.Module:
        """The family's norm of q (0) or k (1)."""
        norm: nn.Module = getattr(self, self.spec.qk_norms[which])
        return norm

    def _normed(self, x: Tensor, which: int) -> Tensor:
        """Heads of q (0) or k (1), [T, heads, D], normed if the family norms each head."""
        return self._norm(which)(x) if self.spec.qk_norm == "head" else x

    def values(self, flat: Tensor) -> Tensor:
        """v [T, H, V]; in float32 for float16 models, whose small outputs would underflow before the norm."""
        v = self._per_state_head(value_heads(self, self.spec, self.dims, flat))
        return v.float() if v.dtype == torch.float16 else v

    def _per_state_head(self, heads: Tensor) -> Tensor:
        """[..., H, D] of key-value heads, or of state heads already: each for every state that it feeds."""
        if heads.shape[-2] == self.state_heads:
            return heads
        return heads.repeat_interleave(self.state_heads // self.dims.kv_heads, -2)

    def _log_decay(self, x: Tensor, name: str) -> Tensor:
        """[T, H, D] gate logits, expanded where channels share them."""
        shape = (x.shape[0], self.state_heads, self.dims.head_dim)
        logits: Tensor = getattr(self, f"{name}_up")(getattr(self, f"{name}_down")(x))
        return logits.view(shape) if self.mixer.decay == "gla" else logits[..., None].expand(shape)

    def _write_strength(self, x: Tensor, name: str) -> Tensor | None:
        """beta [T, H] of the delta rule; None where the layer has none, or none of its own."""
        projection = getattr(self, name, None)
        return None if projection is None else torch.sigmoid(projection(x))

    def mapping_options(self) -> dict[str, Any]:
        """What the operator does to keys and decays."""
        return {
            "k_map": self.mixer.k_feature_map,
            "k_scale": self.sse_k_scale,
            "decay_normalizer": DECAY_NORMALIZER,
        }

    def trains_on_torch(self, device: torch.device) -> str | None:
        """Why `backend: auto` leaves its gradients on a GPU to torch, which is slower than the kernels; else None."""
        if device.type != GPU or self.backend != "auto":
            return None
        dims, delta = self.dims, self.mixer.update == "delta"
        widths = dims.query_heads // self.state_heads, dims.head_dim, dims.value_dim
        return too_wide(max(widths[1:])) or unavailable_reason(device, delta, widths)

    def routing_options(self) -> dict[str, Any]:
        """How the operator routes. The gate of a single partition is 1."""
        gate, several = self.mixer.gate, self.mixer.num_partitions > 1
        return {
            "top_k": self.mixer.top_k,
            "write_gate": several and gate.write,
            "read_gate": several and gate.read,
        }
