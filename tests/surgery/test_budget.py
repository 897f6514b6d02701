"""Costs against real things: built layers, filled caches, counts by hand."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from sse_convert.checkpoints.teacher import attention_shapes
from sse_convert.mixers import FULL, SlidingMixer, SSEMixer, SSESlidingMixer, mixer_from_dict
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.attention_dims import (
    AttentionDims,
    LatentDims,
    attention_dims,
    dims_by_layer,
    native_windows,
)
from sse_convert.surgery.budget import (
    Geometry,
    added_parameters,
    break_even,
    cache_bytes,
    forward_flops,
    layer_bytes,
    mixer_flops,
    state_bytes,
    visible_tokens,
)
from tests.modeling.tiny import LAYOUT, tiny_model
from tests.surgery.models import tokens

VARIANTS = [
    {},
    {"num_partitions": 8, "top_k": 2},
    {"state_heads": "query"},
    {"decay": "scalar", "decay_params": "separate"},
    {"shared_partition": False, "qk_rank": 0},
    {"kind": "sse+sliding", "window": 4, "sinks": 1},
]


def geometry(**changes):
    dims = AttentionDims(hidden=64, query_heads=4, kv_heads=2, head_dim=16, value_dim=16)
    base = {"dims": dims, "windows": (None,) * 4, "cache_element_bytes": 2, "parameters": 10_000, "tied": False}
    base |= {"embedding_parameters": 1000, "attention_parameters": 500, "intermediate": 128, "vocabulary": 50}
    return Geometry(**{**base, **changes})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "deepseek_v3", "gemma4_text"])
def test_added_parameters_are_those_of_the_built_layer(variant, model_type):
    settings = {"kind": "sse", "qk_rank": 4, **variant}
    model = tiny_model(model_type, ("sse", "full", "sse", "full"), {"sse": settings})
    built = sum(tensor.numel() for name, tensor in model.state_dict().items() if "sse_" in name)
    dims = (attention_dims(model.config, layer) for layer in (0, 2))
    assert sum(added_parameters(each, mixer_from_dict(settings)) for each in dims) == built


@pytest.mark.parametrize("length", [3, 9, 20])
@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        *itertools.product(
            ["qwen3", "gemma3_text", "mistral", "youtu", "llama4_text", "gemma4_text"], [*VARIANTS[:3], VARIANTS[-1]]
        ),
        ("qwen3", {**VARIANTS[-1], "full_heads": [1]}),
    ],
)
def test_cache_bytes_are_those_of_a_filled_cache(model_type, variant, length):
    """Full, native sliding, converted sliding and SSE layers, below and above their windows."""
    settings = {"kind": "sse", "qk_rank": 0 if variant.get("qk_rank") == 0 else 4, **variant}
    model = tiny_model(model_type, LAYOUT, {"sse": settings}, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache, use_cache=True)
    by_layer = tuple((dims, 0) for dims in dims_by_layer(model.config))
    sizes = geometry(dims=by_layer[0][0], by_layer=by_layer, windows=tuple(native_windows(model.config)))
    mixers = [None if n == FULL else mixer_from_dict(model.config.sse["mixers"][n]) for n in model.config.sse["layers"]]
    measured = [sum(tensor.nbytes for tensor in _tensors(layer)) for layer in cache.layers]
    assert [layer_bytes(sizes, i, mixer, length) for i, mixer in enumerate(mixers)] == measured
    assert cache_bytes(sizes, mixers, length) == sum(measured)


def _tensors(layer):
    states = getattr(getattr(layer, "recurrent", layer), "recurrent_states", None)
    names = ("keys", "values", "sink_keys", "sink_values")
    held = [getattr(layer, name) for name in names if isinstance(getattr(layer, name, None), torch.Tensor)]
    whole = _tensors(layer.whole) if getattr(layer, "whole", None) is not None else []
    return [*held, *whole, *([states[0]] if states else [])]


def test_latent_attention_caches_what_keys_and_values_are_made_of():
    """DeepSeek V3: 512 + 64 channels of a token against states of 128 heads, each 192 by 128."""
    latent = LatentDims(query=1536, key_value=512, shared_key=64)
    dims = AttentionDims(hidden=7168, query_heads=128, kv_heads=128, head_dim=192, value_dim=128, latent=latent)
    sizes = geometry(dims=dims, windows=(None,) * 2)
    assert layer_bytes(sizes, 0, None, 1000) == 1000 * 576 * 2
    assert state_bytes(sizes, SSEMixer(num_partitions=2)) == 3 * 128 * 192 * 128 * 4
    assert break_even(sizes, [SSEMixer(num_partitions=2), None]) == 3 * 128 * 192 * 128 * 4 // (576 * 2)
    assert mixer_flops(sizes, 0, None, 1001) == 2 * 128 * (192 + 128) * 501
    shapes = attention_shapes(spec_for("deepseek_v3"), dims)
    assert dims.projected == sum(sum(shape) for shape in shapes.values() if len(shape) == 2)


def test_break_even_is_the_first_length_that_is_not_larger():
    sizes, mixers = geometry(windows=(None, None, 8, None)), [SSEMixer(), SlidingMixer(window=100), None, None]
    length = break_even(sizes, mixers)
    plain = [None] * 4
    assert length is not None
    assert cache_bytes(sizes, mixers, length) <= cache_bytes(sizes, plain, length)
    assert cache_bytes(sizes, mixers, length - 1) > cache_bytes(sizes, plain, length - 1)


def test_break_even_never():
    sizes = geometry(windows=(8, None, None, None))
    assert break_even(sizes, [SSEMixer(), None, None, None]) is None  # a window of 7 tokens is smaller than any state
    assert break_even(sizes, [None] * 4) is None


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 9), (100, 1)])
def test_visible_tokens(length, window):
    counted = sum(min(t, window or t) for t in range(1, length + 1)) / length
    assert visible_tokens(length, window) == pytest.approx(counted)


def test_flops_by_hand():
    sizes = geometry()
    assert mixer_flops(sizes, 0, None, 1001) == 4 * 4 * 16 * 501
    assert forward_flops(sizes, [None] * 4, 1001) == pytest.approx(2 * 9000 + 4 * mixer_flops(sizes, 0, None, 1001))
    assert forward_flops(geometry(tied=True), [None] * 4, 1) == 2 * 10_000 + 4 * 4 * 4 * 16
    mixer = SSEMixer(num_partitions=8, top_k=2)
    writes, reads = 3 * (2 + 1) * 2 * 16 * 16, 2 * (2 + 1) * 4 * 16 * 16
    assert mixer_flops(sizes, 0, mixer, 10) == writes + reads + 2 * added_parameters(sizes.dims, mixer)
    assert mixer_flops(sizes, 0, mixer, 10) == mixer_flops(sizes, 0, mixer, 10**6)  # constant in length
    window = 4 * 4 * 16 * visible_tokens(10, 4)
    assert mixer_flops(sizes, 0, SlidingMixer(window=3, sinks=1), 10) == window
    beside = SSESlidingMixer(num_partitions=8, top_k=2, window=3, sinks=1)
    assert mixer_flops(sizes, 0, beside, 10) == mixer_flops(sizes, 0, mixer, 10) + window + 2 * 4
    assert state_bytes(sizes, beside) == layer_bytes(sizes, 0, mixer, 10)
