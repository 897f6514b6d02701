"""Cache layers of converted layers, swapped into whatever transformers `Cache` arrives."""

from collections.abc import Collection
from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache, StaticLayer

from sse_convert.errors import UsageError
from sse_convert.kernels.torch_modes import traced
from sse_convert.modeling.compat import CACHE, CACHE_NAMES
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.state_cache import CountingLayer, SSECacheLayer
from sse_convert.modeling.window_cache import JoinedCacheLayer, SlidingCacheLayer

_FIX = "pass DynamicCache(config=model.config), or leave it out"


def counting_layer(cache: Any) -> Any:
    """A layer of a converted model in the cache, which knows the length; None if there is no cache or no such layer."""
    layers = [] if cache is None else cache.layers
    return next((layer for layer in layers if isinstance(layer, CountingLayer)), None)


def one_cache(arguments: dict[str, Any]) -> Any:
    """The cache among a model's arguments, whichever of its names it has there; None without one.

    Args:
        arguments: of the model, by name.

    Raises:
        UsageError: there are two, or it has another name, under which it would be dropped.
    """
    caches = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    if any(cache is not caches[0] for cache in caches):
        names = " and ".join(CACHE_NAMES)
        raise UsageError(f"{names} are different caches", expected="one", fix=f"pass {CACHE_NAMES[1]} alone")
    for name, value in arguments.items():
        if isinstance(value, Cache) and name not in CACHE_NAMES:
            raise UsageError(f"a {type(value).__name__} as {name}", expected=f"it as {CACHE_NAMES[1]}")
    return caches[0] if caches else None


def named_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """A model's arguments with the cache under one name that this version of transformers knows: it warns of the older.

    Errors as of `one_cache`.
    """
    cache = one_cache(arguments)
    others = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    given = next((name for name in CACHE_NAMES if arguments.get(name) is not None), CACHE)
    return others if cache is None else {**others, max(given, CACHE, key=CACHE_NAMES.index): cache}


def install(
    cache: Any,
    config: Any,
    sse_layers: list[int],
    windows: dict[int, tuple[int, int]],
    full: Collection[int] = (),
    owner: str = "",
) -> None:
    """Swap the layers of a fresh cache for those that converted layers need, and the others' for such as have room on a
    CPU. The second time it only makes sure that they are still there.

    Args:
        cache: any transformers cache, or None.
        config: the model's configuration.
        sse_layers: indices of SSE layers.
        windows: index of each layer with a window -> (window, sinks); those of both kinds are in both arguments.
        full: indices of layers with a window some of whose heads see the whole row.
        owner: what is converted how, and of which sizes: what the cache of another model differs in.

    Raises:
        UsageError: the cache is not a `Cache`, already holds tokens of another model, or was changed since.
    """
    if cache is None:
        return
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise UsageError(
            f"past_key_values is a {type(cache).__name__}", expected="a transformers Cache of a decoder", fix=_FIX
        )
    converted = {*sse_layers, *windows}
    if (known := getattr(cache, "_sse_installed", None)) is not None:
        if known != owner:
            raise UsageError("past_key_values is the cache of another model", expected="one of this model", fix=_FIX)
        if not all(isinstance(cache.layers[index], CountingLayer) for index in converted):
            raise UsageError("layers of past_key_values were replaced", expected="the cache as it was left", fix=_FIX)
        return
    if cache.layer_class_to_replicate is not None and not cache.layers:
        cache.layers.extend(DynamicCache(config=config).layers)
    is_static = isinstance(cache, StaticCache)
    lengths = [getattr(layer, "max_cache_len", None) or 0 for layer in cache.layers]
    static_length = max(lengths) if is_static else None
    if len(cache.layers) <= max(converted):
        raise UsageError(
            f"past_key_values has {len(cache.layers)} layers", expected=f"one for layer {max(converted)}", fix=_FIX
        )
    for index, layer in enumerate(cache.layers):
        if _is_used(layer, index in converted):
            raise UsageError(
                f"past_key_values already holds keys of layer {index}",
                expected="a fresh cache, or one of this model",
                fix=_FIX,
            )
    for index in sse_layers:
        cache.layers[index] = SSECacheLayer(static_length=static_length)
    for index, (window, sinks) in windows.items():
        cache.layers[index] = window_layer(window, sinks, index in sse_layers, index in full, static_length)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = RoomyLayer()
    cache._sse_installed = owner


def window_layer(window: int, sinks: int, state: bool, full: bool, static_length: int | None) -> SlidingCacheLayer:
    """What a layer with a window keeps; arguments as of `JoinedCacheLayer`."""
    if not state and not full:
        return SlidingCacheLayer(window=window, sinks=sinks, static_length=static_length)
    return JoinedCacheLayer(window=window, sinks=sinks, state=state, full=full, static_length=static_length)


def check_pasts(cache: Cache, running: int, length: int) -> None:
    """Make sure that the layers of a cache have the same past: one that received another cache forgets what was before.

    Args:
        cache: a dynamic one.
        running: layers that run.
        length: tokens that each must have seen.

    Raises:
        UsageError: a layer has seen another number.
    """
    for index, layer in enumerate(cache.layers[:running]):
        if isinstance(layer, DynamicLayer | CountingLayer) and (found := layer.get_seq_length()) != length:
            raise UsageError(
                f"layer {index} has seen {found} tokens and its model {length}: it received another cache or none",
                expected="decoder layers that hand on the cache of the model",
                fix="use versions of transformers and of this package that were tried together",
            )


def _is_used(layer: Any, converted: bool) -> bool:
    """Whether a layer holds tokens; the tensors of a static one may be there before any."""
    if not getattr(layer, "is_initialized", False):
        return False
    early = isinstance(layer, StaticLayer) and not converted
    return not early or (not traced() and bool(layer.get_seq_length() > 0))
