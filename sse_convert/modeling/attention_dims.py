"""Sizes of the attention of a model, layer by layer, and what its layers are: by its configuration alone."""

import dataclasses as dc
from typing import Any

from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec

LINEAR = "linear_attention"
"""what `layer_types` of a configuration says of a layer without softmax attention"""
WIDEST_HEAD = 256
"""of torch's flash attention"""
_MASKED_KINDS = {"full_attention", "sliding_attention"}
"""layer types whose masks follow from documents and a window"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LatentDims:
    """Sizes of low-rank projections of q, k and v."""

    query: int | None
    """rank of q's; None where q has one projection"""
    key_value: int
    """rank of that of k and v"""
    shared_key: int
    """last channels of a key, which all heads share"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionDims:
    """Sizes of one attention layer."""

    hidden: int
    """width of the residual stream"""
    query_heads: int
    """Hq"""
    kv_heads: int
    """heads of k and v"""
    head_dim: int
    """D, size of a query and a key"""
    value_dim: int
    """V, size of a value; the same as D but for latent attention"""
    latent: LatentDims | None = None
    """sizes of low-rank projections, None for whole ones"""
    own_values: bool = True
    """whether values have a projection of their own; else keys serve as values"""

    def without(self, kv_heads: int) -> "AttentionDims":
        """The same with so many key-value heads less, and the query heads that read them."""
        each, left = self.query_heads // self.kv_heads, self.kv_heads - kv_heads
        return dc.replace(self, query_heads=left * each, kv_heads=left)

    @property
    def cached(self) -> int:
        """Elements that a softmax layer's cache keeps of a token: keys and values, or what they are made of."""
        if self.latent is not None:
            return self.latent.key_value + self.latent.shared_key
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def projected(self) -> int:
        """Inputs and outputs of all projections, summed."""
        query, output = self.query_heads * self.head_dim, self.query_heads * self.value_dim
        if self.latent is None:
            inputs = (4 if self.own_values else 3) * self.hidden
            return inputs + query + self.kv_heads * (self.head_dim + self.own_values * self.value_dim) + output
        rank, shared = self.latent.key_value, self.latent.shared_key
        expanded = self.query_heads * (self.head_dim - shared + self.value_dim)
        return 3 * self.hidden + 2 * (self.latent.query or 0) + query + 2 * rank + shared + expanded + output


def softmax_layers(config: Any) -> list[int]:
    """Indices of the layers with softmax attention, which can be converted.

    Args:
        config: a transformers configuration object.
    """
    config = decoder_config(config)
    kinds = getattr(config, "layer_types", None) or []
    return [i for i in range(config.num_hidden_layers) if i >= len(kinds) or kinds[i] != LINEAR]


def attention_dims(config: Any, layer: int = 0) -> AttentionDims:
    """Sizes of an attention layer of a model. In most families all layers are alike.

    Args:
        config: a transformers configuration object.
        layer: its index.
    """
    config = decoder_config(config)
    spec, heads = source_spec(config.model_type), config.num_attention_heads
    if spec.qkv_layout == "latent":
        return AttentionDims(
            hidden=config.hidden_size,
            query_heads=heads,
            kv_heads=heads,
            head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            latent=LatentDims(
                query=config.q_lora_rank, key_value=config.kv_lora_rank, shared_key=config.qk_rope_head_dim
            ),
        )
    own = config.per_layer_config[layer] if differs_by_layer(config) else config
    head_dim = getattr(own, "head_dim", None) or config.hidden_size // heads
    reuses_keys = spec.keys_as_values is not None and getattr(config, spec.keys_as_values)
    return AttentionDims(
        hidden=config.hidden_size,
        query_heads=heads,
        kv_heads=getattr(own, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=head_dim,
        own_values=not (reuses_keys and config.layer_types[layer] == "full_attention"),
    )


def differs_by_layer(config: Any) -> bool:
    """Whether transformers describes the layers of a model one by one, as their sizes may differ.

    Args:
        config: a transformers configuration object.
    """
    return bool(getattr(decoder_config(config), "is_heterogeneous", False))


def dims_by_layer(config: Any) -> tuple[AttentionDims, ...]:
    """Sizes of the attention of each layer of a model.

    Args:
        config: a transformers configuration object.
    """
    config = decoder_config(config)
    return tuple(attention_dims(config, layer) for layer in range(config.num_hidden_layers))


def document_attention_problem(config: Any) -> str | None:
    """Why a model needs masks for its packed rows; None if `document_attention.document_attention` does what they say.

    Args:
        config: of a model of a known family, plain or converted.
    """
    spec, config = source_spec(config.model_type), decoder_config(config)
    widest = max(max(dims.head_dim, dims.value_dim) for dims in dims_by_layer(config))
    found = {
        "decoder layers keep their arguments to themselves": not spec.hands_on,
        "layers have linear attention of their own": spec.linear_layers,
        "attention scores are bounded": bounds_scores(config),
        "attention has dropout": bool(getattr(config, "attention_dropout", 0.0)),
        f"heads are {widest} wide": widest > WIDEST_HEAD,
        "some layers have masks of another kind": has_other_masks(config),
        "windows are in the masks alone": spec.windows_in_masks and any(native_windows(config)),
    }
    return next((problem for problem, holds in found.items() if holds), None)


def heads_problem(config: Any, layer: int, heads: tuple[int, ...]) -> str | None:
    """Why some heads of a layer cannot see the whole row while a mixer replaces the others; None if they can.

    Args:
        config: of a model of a known family, plain or converted.
        layer: its index.
        heads: key-value heads.
    """
    spec, windows, of = source_spec(config.model_type), native_windows(config), attention_dims(config, layer).kv_heads
    found = {
        "heads share what low-rank projections make of keys and values": spec.qkv_layout == "latent",
        "queries and keys are normed over all heads together": spec.qk_norm == "whole",
        "attention has learned sinks": bool(spec.softmax_parameters),
        f"all heads see a window of {windows[layer]} already": windows[layer] is not None,
        f"there are {of} key-value heads": max(heads) >= of,
        f"these are all of its {of} key-value heads: name the layer in layers.keep": len(heads) >= of,
    }
    return next((problem for problem, holds in found.items() if holds), None)


def separable_heads(config: Any) -> tuple[int, ...]:
    """Of each layer, the key-value heads of which some can see the whole row beside a mixer; 0 where none can.

    Args:
        config: of a model of a known family, plain or converted.
    """
    softmax, dims = set(softmax_layers(config)), dims_by_layer(config)
    return tuple(
        dims[i].kv_heads if i in softmax and heads_problem(config, i, (0,)) is None else 0 for i in range(len(dims))
    )


def native_windows(config: Any) -> list[int | None]:
    """The sliding window, or chunk, of each layer of a source model, as transformers' caches see it; None for full
    attention."""
    config = decoder_config(config)
    window = getattr(config, "sliding_window", None)
    bounds = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return [bounds.get(kind) for kind in types * (config.num_hidden_layers // len(types))]


def bounds_scores(config: Any) -> bool:
    """Whether attention scores are bounded (soft caps).

    Args:
        config: of the text model.
    """
    return getattr(config, "attn_logit_softcapping", None) is not None


def has_other_masks(config: Any) -> bool:
    """Whether some layers see other tokens than all before them, or the last of these.

    Args:
        config: of the text model.
    """
    return not set(getattr(config, "layer_types", None) or []) <= _MASKED_KINDS
