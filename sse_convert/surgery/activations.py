"""Bytes of activations that one decoder layer keeps for the backward pass, per token, from sizes alone.

d is the width, m that of the feed-forward layer, q = Hq*D, kv = Hkv*D, a = 2 under bfloat16 autocast or 4:
    norms and residual      24 d + 2 d if a = 2, and 6 (q + kv) where q and k are normalised
    feed-forward            4 a m
    softmax attention       2 a (q + kv)
    window (w, s sinks)     4 a q + (2 a q s / w) + a (2 w + s) beside that: two copies of keys and values, and the mask
                            of a block, which is once more kept for all layers, with a byte for each entry
    SSE                     see `_sse_bytes`
A frozen matrix needs no input for the backward pass, and a frozen norm not what it scales; `spared_by_layer`.
The constants were fitted to what autograd saves (tests/surgery/test_memory.py holds them to it).
"""

from sse_convert.mixers import Mixer, SSEMixer, WindowMixer
from sse_convert.modeling.tensors import own_dims, state_heads
from sse_convert.surgery.budget import Geometry

SCORE_BYTES = 8
"""of a pair of tokens and a head, where attention writes scores out: what autograd keeps of them"""
STATE_CHUNK = 64
"""tokens per chunk of the torch backends, which keep one state per chunk"""


def kept_by_layer(geometry: Geometry, mixer: Mixer | None, element: int) -> float:
    """Activation bytes per token of a whole decoder layer."""
    norms = (24 + 2 * (element == 2)) * geometry.dims.hidden
    return norms + 4 * element * geometry.intermediate + kept_by_attention(geometry, mixer, element)


def spared_by_layer(geometry: Geometry, mixer: Mixer | None, element: int) -> float:
    """Of these, what a layer does not keep where nothing of it is trained but converted attention: what norms scale,
    and inputs of matrices, which autocast copies for each."""
    hidden, dims = geometry.dims.hidden, geometry.dims
    spared = 12.0 * hidden + element * geometry.intermediate
    if mixer is None:
        normed = geometry.qk_norm * (dims.query_heads + dims.kv_heads) * dims.head_dim
        spared += (6 if element == 2 else 4) * hidden + element * normed
    return spared


def _norm_bytes(geometry: Geometry) -> float:
    return 6 * geometry.qk_norm * (geometry.dims.query_heads + geometry.dims.kv_heads) * geometry.dims.head_dim


def kept_by_attention(geometry: Geometry, mixer: Mixer | None, element: int) -> float:
    """Activation bytes per token of a layer's attention, converted or not."""
    dims = geometry.dims
    state = _sse_bytes(geometry, mixer, element) if isinstance(mixer, SSEMixer) else 0.0
    if state and not isinstance(mixer, WindowMixer):
        return state
    softmax = element * (dims.query_heads + dims.kv_heads) * (dims.head_dim + dims.value_dim) + _norm_bytes(geometry)
    return state + softmax + (_window_bytes(geometry, mixer, element) if isinstance(mixer, WindowMixer) else 0)


def block_keys(mixer: WindowMixer) -> int:
    """Keys that a query is compared with."""
    return 2 * mixer.window + mixer.sinks


def _window_bytes(geometry: Geometry, mixer: WindowMixer, element: int) -> float:
    heads, keys = geometry.dims.query_heads, block_keys(mixer)
    copied = heads * (geometry.dims.head_dim + geometry.dims.value_dim) / mixer.window
    return keys * (element * (1 + copied) + SCORE_BYTES * heads * geometry.scores_written)


def _sse_bytes(geometry: Geometry, mixer: SSEMixer, element: int) -> float:
    heads, dims = state_heads(geometry.dims, mixer), own_dims(geometry.dims, mixer)
    query, state = dims.query_heads * dims.head_dim, heads * dims.head_dim
    output, value = dims.query_heads * dims.value_dim, heads * dims.value_dim
    used = mixer.top_k
    slots = used + mixer.shared_partition
    operator = slots * (4 * (query + 2 * state + value) + 4 * state * dims.value_dim / STATE_CHUNK)
    routed = used * 4 * (query + state)
    sets, norms = 1 + mixer.shared_partition, 6 * geometry.qk_norm
    maps = sets * ((8 + norms) * state + norms * query) + element * (query + state)
    return operator + routed + maps + 4 * value + 16 * output
