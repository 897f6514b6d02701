"""Cache layers of converted layers, swapped into whatever transformers `Cache` arrives."""

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache

from sse_convert.errors import UsageError
from sse_convert.modeling.counting_cache import CountingLayer
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.state_cache import SSECacheLayer
from sse_convert.modeling.window_cache import SlidingCacheLayer, SSESlidingCacheLayer


def counting_layer(cache: Any) -> Any:
    """A layer of a converted model in the cache, which knows the length; None if there is no cache or no such layer."""
    layers = [] if cache is None else cache.layers
    return next((layer for layer in layers if isinstance(layer, CountingLayer)), None)


def install(cache: Any, config: Any, sse_layers: list[int], windows: dict[int, tuple[int, int]]) -> None:
    """Swap the layers of a fresh cache for those that converted layers need, and the others' for such as have room on a
    CPU. Does nothing the second time.

    Args:
        cache: any transformers cache, or None.
        config: the model's configuration.
        sse_layers: indices of SSE layers.
        windows: index of each layer with a window -> (window, sinks); those of both kinds are in both arguments.

    Raises:
        UsageError: the cache is not a `Cache`, or already holds keys of a converted layer.
    """
    if cache is None or getattr(cache, "_sse_installed", False):
        return
    if not isinstance(cache, Cache):
        raise UsageError(
            f"past_key_values is a {type(cache).__name__}",
            expected="a transformers Cache",
            fix="pass DynamicCache(config=model.config), or leave it out",
        )
    if cache.layer_class_to_replicate is not None and not cache.layers:
        cache.layers.extend(DynamicCache(config=config).layers)
    is_static = isinstance(cache, StaticCache)
    lengths = [getattr(layer, "max_cache_len", None) or 0 for layer in cache.layers]
    static_length = max(lengths) if is_static else None
    for index in (*sse_layers, *windows):
        if getattr(cache.layers[index], "is_initialized", False):
            raise UsageError(
                f"past_key_values already holds keys of layer {index}",
                expected="a fresh cache, or one of this model",
                fix="pass DynamicCache(config=model.config), or leave it out",
            )
    for index in sse_layers:
        cache.layers[index] = SSECacheLayer(static_length=static_length)
    for index, (window, sinks) in windows.items():
        kind = SSESlidingCacheLayer if index in sse_layers else SlidingCacheLayer
        cache.layers[index] = kind(window=window, sinks=sinks, static_length=static_length)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = RoomyLayer()
    cache._sse_installed = True
