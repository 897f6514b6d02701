"""The attention of one new token per row in few launches: projections of the norm, heads, attention, output added.

Softmax over a whole row and SSE are here, `fused_windows` has layers with windows.

Shape letters: B rows, Hq query heads, H heads of the state or the cache, D key dim, V value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from sse_convert.inference.fused_norms import Norm, norm_of
from sse_convert.inference.fused_weights import FEW_ROWS, NotFusedError, Pair, added, plain_tensor, projection
from sse_convert.modeling.compat import CACHE
from sse_convert.modeling.context import current_shard
from sse_convert.modeling.initialise import NORM_EPS, precise_dtype
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import LAYOUT
from sse_convert.modeling.state_cache import FixedLayer
from sse_convert.modeling.window.sliding import TOKEN_ATTENTION
from sse_convert.modeling.window.window_branch import branch_sum

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


class Projected:
    """The projections of a layer's input, side by side.

    Args:
        parts: name -> weight and bias of its projections, which stand together.
        norm: of the input.
    """

    def __init__(self, parts: dict[str, list[Pair]], norm: Norm) -> None:
        self._parts, pairs = parts, [pair for part in parts.values() for pair in part]
        self._weights, self._biases = [w for w, _ in pairs], [b for _, b in pairs]
        self.columns: dict[str, int] = {}
        self._sizes = {name: sum(len(weight) for weight, _ in part) for name, part in parts.items()}
        width = 0
        for name, size in self._sizes.items():
            self.columns[name], width = width, width + size
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [B, columns]; those of SSE are float32 products of many rows too."""
        if len(x) > FEW_ROWS:
            return self._of_many(x)
        from sse_convert.kernels.triton.generation.row_products import row_products

        return row_products(x, self._norm.weight, self._norm.eps, self._norm.offset, self._weights, self._biases)

    def _of_many(self, x: Tensor) -> Tensor:
        from sse_convert.kernels.triton.generation.norm import rms_norm
        from sse_convert.kernels.triton.generation.precise_linear import precise_linear

        normed = rms_norm(x, self._norm.weight, self._norm.eps, True, self._norm.offset, x.dtype)
        parts = (
            precise_linear(normed, weight, bias) if name in OF_INPUT else F.linear(normed, weight, bias)
            for name, part in self._parts.items()
            for weight, bias in part
        )
        return torch.cat([part.float() for part in parts], 1)

    def of(self, projected: Tensor, name: str) -> Tensor | None:
        """Columns of one projection; None where there is none."""
        first = self.columns.get(name)
        return None if first is None else projected[:, first : first + self._sizes[name]]

    def heads(self, projected: Tensor, names: tuple[str, str, str]) -> tuple[Tensor, dict[str, int]]:
        """Columns from those of q on, and where k and v begin among them; `names` are theirs."""
        first, *others = (self.columns[name] for name in names)
        return projected[:, first:], {"q": 0, "k": others[0] - first, "v": others[1] - first}


class CacheHeads:
    """Softmax heads over a cache of fixed size, by the attention that the model is set to.

    Args:
        attention: a family's module.
        dtype: of the model.
    """

    def __init__(self, attention: Any, dtype: torch.dtype) -> None:
        from sse_convert.kernels.triton.generation.token_heads import HeadWeights

        if attention.head_dim % 2:
            raise NotFusedError("heads of an odd size")
        self._attention, self._dtype = attention, dtype
        norms = [norm_of(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._weights = HeadWeights(**norm_weights(norms, dtype))
        self._rotates = bool(getattr(attention, "use_rope", True))

    def takes(self, layer: Any, given: dict[str, Any]) -> bool:
        """Whether the rotation is known, and `layer` of a cache has a slot for every position, in the model's dtype."""
        fixed = type(layer) is FixedLayer and layer.is_initialized and layer.keys.dtype == self._dtype
        return fixed and self.knows_rotation(given)

    def knows_rotation(self, given: dict[str, Any]) -> bool:
        """Whether the decoder layer was given what whole heads are rotated by, if they are."""
        return (self._rotation(given) is not None) is self._rotates

    def _rotation(self, given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        return rotation_of(given, self._attention.head_dim) if self._rotates else None

    def placed(
        self, projected: Tensor, columns: dict[str, int], given: dict[str, Any], cache: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, D], k and v [B, H, D], normed and rotated; k and v of a cache with their slots [B, H, slots, D].

        Args:
            projected: [B, columns] of the heads.
            columns: where q, k and v begin.
            given: to the decoder layer.
            cache: a layer of one, with a slot for every position, which takes k and v.
        """
        from sse_convert.kernels.triton.generation.token_heads import Heads, token_heads

        B, D = len(projected), self._attention.head_dim
        q = projected.new_empty(B, columns["k"] // D, D, dtype=self._dtype)
        k, v, slot = (None, None, None) if cache is None else (cache.keys, cache.values, cache.cumulative_length)
        if k is None or v is None:
            k, v = q.new_empty(2, B, (columns["v"] - columns["k"]) // D, D).unbind()
        out = Heads(q=q, k=k, v=v, slot=slot)
        token_heads(projected, columns, self._weights, self._rotation(given), out)
        if slot is not None:
            slot.add_(1)
        return q, k, v

    def attended(
        self, projected: Tensor, columns: dict[str, int], layer: Any, given: dict[str, Any], name: str
    ) -> Tensor:
        """[B, Hq, D] of attention to all slots that the mask shows; `name` is that of the attention."""
        q, k, v = self.placed(projected, columns, given, layer)
        attend, attention = AttentionInterface()[name], self._attention
        o, _ = attend(attention, q[:, :, None], k, v, given.get("attention_mask"), scaling=attention.scaling)
        heads: Tensor = o[:, 0]
        return heads


class CachePart:
    """A family's softmax attention over a cache of fixed size."""

    def __init__(self, attention: Any, norm: Norm, dtype: torch.dtype) -> None:
        self._attention, self._heads = attention, CacheHeads(attention, dtype)
        self._projected = Projected({key: [projection(attention, f"{key}_proj", dtype)] for key in "qkv"}, norm)
        self._output = projection(attention, "o_proj", dtype)

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: with a cache of fixed size, and the mask of its slots."""
        cache, name = given.get(CACHE), self._attention.config._attn_implementation
        layer: Any = None if cache is None else cache.layers[self._attention.layer_idx]
        if name not in MASKED_ATTENTION or not self._heads.takes(layer, given):
            return None
        projected = self._projected(x)
        heads = self._heads.attended(projected, self._projected.columns, layer, given, name)
        return added(heads.reshape(len(x), -1), self._output, x)


def new_projections(attention: SSEAttention, dtype: torch.dtype) -> dict[str, list[Pair]]:
    """What SSE projects its input to, beside q, k and v."""
    return {key: [projection(attention, name, dtype)] for key, name in OF_INPUT.items() if hasattr(attention, name)}


class StateHeads:
    """The heads of SSE with a state for every row, by the backend that the layer is set to.

    Args:
        attention: the layer.
        projected: its projections, of which q, k and v come first.
        dtype: of the model.
    """

    def __init__(self, attention: SSEAttention, projected: Projected, dtype: torch.dtype) -> None:
        _check_state_layer(attention)
        spec, mixer = attention.spec, attention.mixer
        self._attention, self._projected, self._dtype = attention, projected, dtype
        self._scale = plain_tensor(attention.sse_out_scale, attention.sse_out_scale.dtype, "sse_out_scale")
        norms = [norm_of(getattr(attention, name)) for name in spec.qk_norms] if spec.qk_norm == "head" else []
        self._heads = _state_heads(attention, norms, dtype)
        self._own_decay = mixer.decay_params == "separate"

    def takes(self, given: dict[str, Any]) -> bool:
        """Whether there are a state, and no padding among the new tokens."""
        attention, layout = self._attention, given.get(LAYOUT)
        kept = None if layout is None else attention.kept(layout, given)
        if layout is None or kept is None or kept.state is None or current_shard() is not None:
            return False
        return layout.tokens is None and layout.real is None

    def __call__(self, projected: Tensor, given: dict[str, Any]) -> Tensor:
        """[B, Hq, V] of what the state then holds, before the norm."""
        attention, layout = self._attention, given[LAYOUT]
        inputs = self._inputs(projected)
        attention.remember(inputs["router_logits"], None)
        return attention.run_operator(inputs, layout, attention.kept(layout, given), 1)

    def added(self, heads: Tensor, output: Pair, x: Tensor, beside: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x [B, hidden] + the projection of `heads` [B, Hq, V], normed and scaled, and of heads [B, Hq, V] beside them
        times their scale [Hq]."""
        from sse_convert.kernels.triton.generation.added_product import added_product

        if len(x) <= FEW_ROWS:
            both = None if beside is None else (beside[0].flatten(1), beside[1])
            flat, size = heads.flatten(1).contiguous(), heads.shape[2]
            return added_product(flat, *output, x, self._scale, size, NORM_EPS, both)
        joined = (
            self._attention.scaled(heads, self._dtype) if beside is None else self.joined(heads, *beside).flatten(1)
        )
        return added(joined, output, x)

    def joined(self, heads: Tensor, window: Tensor, scale: Tensor) -> Tensor:
        """[B, Hq, V] of `heads`, normed and scaled, and those of a window times their scale [Hq], added unrounded."""
        return branch_sum(self._attention.scaled(heads, precise_dtype(window)), window, scale)

    def _inputs(self, projected: Tensor) -> dict[str, Any]:
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
        decay = empty(H, D, torch.float32)
        own = empty(H, D, torch.float32) if self._own_decay else None
        out = Heads(q=q, k=k, v=v, shared=side, decay=decay, shared_decay=own)
        token_heads(projected, self._projected.columns, self._heads, None, out)
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


class StatePart:
    """SSE attention alone."""

    def __init__(self, attention: SSEAttention, norm: Norm, dtype: torch.dtype) -> None:
        spec = attention.spec
        own = {key: [projection(attention, name, dtype)] for key, name in zip("qkv", spec.qkv, strict=True)}
        self._attention = attention
        self._projected = Projected({**own, **new_projections(attention, dtype)}, norm)
        self._heads = StateHeads(attention, self._projected, dtype)
        self._output = projection(attention, spec.output, dtype)

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """As `Part`: of rows without padding, each with a state."""
        return (
            self._heads.added(self._heads(self._projected(x), given), self._output, x)
            if self._heads.takes(given)
            else None
        )


def _check_state_layer(attention: SSEAttention) -> None:
    """Make sure that a layer is one of those that the kernels compute.

    Raises:
        NotFusedError: naming the first thing that is not.
    """
    spec, width = attention.spec, attention.dims.value_dim
    problems = [
        (spec.qkv_layout != "separate" or len(spec.qkv) != 3, "projections that are not separate"),
        (spec.gated, "the source's output gate"),
        (spec.value_norm is not None, "a norm of values"),
        (spec.qk_norm == "whole", "norms of q and k over the whole"),
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
        **norm_weights(norms, dtype),
        side=None if side_q is None or side_k is None else (side_q[0], side_k[0]),
        decay=second("sse_decay"),
        shared_decay=second("sse_shared_decay"),
    )


def norm_weights(norms: list[Norm | None], dtype: torch.dtype) -> dict[str, Any]:
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


def rotation_of(given: dict[str, Any], dim: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin [1 or B, D] of what a decoder layer was given; None where they are not of whole heads."""
    embeddings = given.get("position_embeddings")
    if not isinstance(embeddings, tuple) or embeddings[0].shape[-1] != dim:
        return None
    cos, sin = (part[:, 0].contiguous() for part in embeddings)
    return cos, sin
