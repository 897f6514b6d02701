"""The attention of one new token per row in few launches: projections of the norm, heads, attention, output added.

Shape letters: B rows, Hq query heads, H heads of the state or the cache, D key dim, V value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import StaticLayer

from sse_convert.inference.fused_norms import Norm, norm_of
from sse_convert.inference.fused_weights import NotFusedError, is_transformers, plain_tensor, projection
from sse_convert.modeling.compat import CACHE, is_bare
from sse_convert.modeling.context import current_shard
from sse_convert.modeling.initialise import NORM_EPS
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.window.sliding import TOKEN_ATTENTION

Part = Callable[[Tensor, dict[str, Any]], Tensor | None]
"""(x [B, hidden], what the decoder layer was given) -> x + attention of its norm; None for what it does not compute"""
MASKED_ATTENTION = {TOKEN_ATTENTION}
"""names of attention that takes one query, all slots of a cache and their mask"""
OF_INPUT = {
    "side_q": "sse_delta_q_down",
    "side_k": "sse_delta_k_down",
    "decay": "sse_decay_down",
    "shared_decay": "sse_shared_decay_down",
    "router": "sse_router",
    "strength": "sse_write_strength",
    "shared_strength": "sse_shared_write_strength",
}
"""what SSE projects its input to, beside q, k and v -> the module"""


def attention_part(attention: nn.Module, family: str, norm: Norm, dtype: torch.dtype) -> Part:
    """What computes an attention module.

    Args:
        attention: of a decoder layer.
        family: stem of the names of its classes.
        norm: of its input.
        dtype: of the model.

    Raises:
        NotFusedError: it is of another kind, or its weights are not plain.
    """
    if not is_bare(attention):
        raise NotFusedError("hooks stand around the attention")
    if type(attention) is SSEAttention:
        return StatePart(attention, norm, dtype)
    if is_transformers(attention, f"{family}Attention"):
        return CachePart(attention, norm, dtype)
    raise NotFusedError(f"{type(attention).__name__} has no step of its own")


class _Projected:
    """The projections of a layer's input, side by side."""

    def __init__(self, attention: nn.Module, names: dict[str, str], norm: Norm, dtype: torch.dtype) -> None:
        pairs = [projection(attention, name, dtype) for name in names.values()]
        self.weights, self.biases = [w for w, _ in pairs], [b for _, b in pairs]
        self.columns: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        width = 0
        for name, weight in zip(names, self.weights, strict=True):
            self.columns[name], self._sizes[name] = width, len(weight)
            width += len(weight)
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [B, columns]."""
        from sse_convert.kernels.triton.generation.row_products import row_products

        return row_products(x, self._norm.weight, self._norm.eps, self._norm.offset, self.weights, self.biases)

    def of(self, projected: Tensor, name: str) -> Tensor | None:
        """Columns of one projection; None where there is none."""
        first = self.columns.get(name)
        return None if first is None else projected[:, first : first + self._sizes[name]]


class CachePart:
    """Softmax attention over a cache of fixed size, by the attention that the model is set to."""

    def __init__(self, attention: Any, norm: Norm, dtype: torch.dtype) -> None:
        from sse_convert.kernels.triton.generation.token_heads import HeadWeights

        if attention.head_dim % 2:
            raise NotFusedError("heads of an odd size")
        self._attention, self._dtype = attention, dtype
        self._projected = _Projected(attention, {"q": "q_proj", "k": "k_proj", "v": "v_proj"}, norm, dtype)
        self._output = projection(attention, "o_proj", dtype)
        norms = [norm_of(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._heads = HeadWeights(**_norm_weights(norms, dtype))
        self._rotates = bool(getattr(attention, "use_rope", True))

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: with a cache of fixed size, and the mask of its slots."""
        from sse_convert.kernels.triton.generation.added_product import added_product
        from sse_convert.kernels.triton.generation.token_heads import Heads, token_heads

        attention, cache, mask = self._attention, given.get(CACHE), given.get("attention_mask")
        name = attention.config._attn_implementation
        layer: Any = None if cache is None else cache.layers[attention.layer_idx]
        if type(layer) is not StaticLayer or name not in MASKED_ATTENTION or not layer.is_initialized:
            return None
        D = attention.head_dim
        rotation = _rotation(given.get("position_embeddings"), D) if self._rotates else None
        if (rotation is None) is self._rotates or layer.keys.dtype != self._dtype:
            return None
        projected = self._projected(x)
        q = x.new_empty(len(x), len(self._projected.weights[0]) // D, D)
        out = Heads(q=q, k=layer.keys, v=layer.values, slot=layer.cumulative_length)
        token_heads(projected, self._projected.columns, self._heads, rotation, out)
        layer.cumulative_length.add_(1)
        attend = AttentionInterface()[name]
        o, _ = attend(attention, q[:, :, None], layer.keys, layer.values, mask, scaling=attention.scaling)
        return added_product(o.reshape(len(x), -1).contiguous(), *self._output, x, None, 1, 0.0)


class StatePart:
    """SSE attention with a state for every row, by the backend that the layer is set to."""

    def __init__(self, attention: SSEAttention, norm: Norm, dtype: torch.dtype) -> None:
        _check_state_layer(attention)
        spec, mixer = attention.spec, attention.mixer
        self._attention, self._dtype = attention, dtype
        names = {**dict(zip("qkv", spec.qkv, strict=True)), **OF_INPUT}
        self._projected = _Projected(
            attention, {key: name for key, name in names.items() if hasattr(attention, name)}, norm, dtype
        )
        self._output = projection(attention, spec.output, dtype)
        self._scale = plain_tensor(attention.sse_out_scale, attention.sse_out_scale.dtype, "sse_out_scale")
        norms = [norm_of(getattr(attention, name)) for name in spec.qk_norms] if spec.qk_norm == "head" else []
        self._heads = _state_heads(attention, norms, dtype)
        self._own_decay = mixer.decay_params == "separate" and mixer.decay != "none"

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: of rows without padding, each with a state."""
        from sse_convert.kernels.triton.generation.added_product import added_product

        attention, layout = self._attention, given.get("sse_layout")
        if layout is None:
            return None
        kept = attention.kept(layout, given)
        if kept is None or kept.state is None or current_shard() is not None:
            return None
        if layout.tokens is not None or layout.real is not None:
            return None
        rotation = _rotation(given.get("position_embeddings"), attention.dims.head_dim) if attention.rotates else None
        if (rotation is None) is attention.rotates:
            return None
        inputs = self._inputs(self._projected(x), rotation)
        attention.remember(inputs["router_logits"], None)
        heads = attention.run_operator(inputs, layout, kept, 1).flatten(1).contiguous()
        return added_product(heads, *self._output, x, self._scale, attention.dims.value_dim, NORM_EPS)

    def _inputs(self, projected: Tensor, rotation: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
        """Of the operator."""
        from sse_convert.kernels.triton.generation.token_heads import Heads, token_heads

        attention, mixer, dims = self._attention, self._attention.mixer, self._attention.dims
        B, H, D = len(projected), attention.state_heads, dims.head_dim

        def empty(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
            return projected.new_empty(B, heads, dim, dtype=dtype)

        def queries_and_keys() -> tuple[Tensor, Tensor]:
            return empty(dims.query_heads, D, self._dtype), empty(H, D, self._dtype)

        (q, k), side = queries_and_keys(), queries_and_keys() if mixer.qk_rank else None
        v = empty(H, dims.value_dim, torch.float32 if self._dtype == torch.float16 else self._dtype)
        none = mixer.decay == "none"
        decay = projected.new_zeros(B, H, D) if none else empty(H, D, torch.float32)
        own = empty(H, D, torch.float32) if self._own_decay else None
        out = Heads(q=q, k=k, v=v, shared=side, decay=None if none else decay, shared_decay=own)
        token_heads(projected, self._projected.columns, self._heads, rotation, out)
        logits, strength, own_strength = (
            self._projected.of(projected, name) for name in ("router", "strength", "shared_strength")
        )
        shared_q, shared_k = side or (q, k)
        return {
            "q": q,
            "k": k,
            "v": v,
            "log_decay": decay,
            "router_logits": projected.new_zeros(B, 1) if logits is None else logits,
            "shared": (shared_q, shared_k, decay if own is None else own) if mixer.shared_partition else None,
            "write_strength": None if strength is None else strength.sigmoid(),
            "shared_write_strength": None if own_strength is None else own_strength.sigmoid(),
            **attention.mapping_options(),
            **attention.routing_options(),
        }


def _check_state_layer(attention: SSEAttention) -> None:
    """Make sure that a layer is one of those that the kernels compute.

    Raises:
        NotFusedError: naming the first thing that is not.
    """
    spec, mixer, width = attention.spec, attention.mixer, attention.dims.value_dim
    problems = [
        (spec.qkv_layout != "separate" or len(spec.qkv) != 3, "projections that are not separate"),
        (spec.gated, "the source's output gate"),
        (spec.value_norm is not None, "a norm of values"),
        (spec.qk_norm == "whole" or spec.norm_after_rotation, "norms of q and k over the whole, or after rotation"),
        (attention.rotates and spec.rotary_pairs != "halves", "rotation of neighbours"),
        (mixer.router == "keys", "partitions chosen by keys"),
        (attention.dims != attention.source_dims, "heads that see the whole row"),
        (width & (width - 1) != 0, f"heads of {width} values, no power of two"),
        (attention.dims.head_dim % 2 != 0, "heads of an odd size"),
        (bool(attention.output_dropout) and attention.training, "dropout"),
    ]
    if found := next((what for wrong, what in problems if wrong), None):
        raise NotFusedError(found)


def _state_heads(attention: SSEAttention, norms: list[Norm | None], dtype: torch.dtype) -> Any:
    """The weights between projections and operator."""
    from sse_convert.kernels.triton.generation.token_heads import HeadWeights

    def second(name: str) -> tuple[Tensor, Any] | None:
        return projection(attention, f"{name}_up", dtype) if hasattr(attention, f"{name}_up") else None

    side_q, side_k = second("sse_delta_q"), second("sse_delta_k")
    return HeadWeights(
        **_norm_weights(norms, dtype),
        side=None if side_q is None or side_k is None else (side_q[0], side_k[0]),
        decay=second("sse_decay"),
        shared_decay=second("sse_shared_decay"),
    )


def _norm_weights(norms: list[Norm | None], dtype: torch.dtype) -> dict[str, Any]:
    """Those of q and k, as `HeadWeights` has them.

    Raises:
        NotFusedError: one is of an unknown class, or they differ in more than weights.
    """
    if not norms:
        return {}
    q, k = norms
    if q is None or k is None or q[1:] != k[1:]:
        raise NotFusedError("norms of q and k of an unknown class")
    gains = plain_tensor(q.weight, dtype, "norm of q"), plain_tensor(k.weight, dtype, "norm of k")
    return {"norms": gains, "eps": q.eps, "offset": q.offset}


def _rotation(embeddings: Any, dim: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin [1 or B, D]; None where they are not of whole heads."""
    if not isinstance(embeddings, tuple) or embeddings[0].shape[-1] != dim:
        return None
    cos, sin = (part[:, 0].contiguous() for part in embeddings)
    return cos, sin
