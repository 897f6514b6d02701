"""What a hybrid costs: cache and state bytes by length, FLOPs, and where it breaks even with its teacher. No torch.

Cache of one sequence after L tokens, per layer (what the caches hold between decoding steps):
    full attention          Hkv * (D + V) * L * bytes
    native sliding window   Hkv * (D + V) * min(L, window - 1) * bytes
    `sliding` mixer         Hkv * (D + V) * (window - 1 + sinks) * bytes      allocated whole
    recurrent mixer         (N + shared) * H * D * V * 4                       float32 whatever the model's dtype
    `sse+sliding`           the sum of the last two
Latent attention keeps what its keys and values are made of, rank + shared channels in place of Hkv * (D + V).

Forward FLOPs of one token (a multiply-add counts two):
    weights                 2 * (stored parameters, without an untied input embedding and experts it is not sent to)
    softmax attention       2 * Hq * (D + V) * (mean number of visible tokens at this sequence length)
    SSE operator            (k + shared) * 3 * H * D * V  to decay and write,  (k' + shared) * 2 * Hq * D * V  to read
                            (5 in place of 3 under the delta rule, which reads before it writes)
The operator is counted in its recurrent form; chunk-parallel backends trade more FLOPs for speed.
"""

import dataclasses as dc
import math

from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer, WindowMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.tensors import new_tensors, own_dims, state_heads, state_shape

STATE_BYTES = 4
ENDLESS = 131072
"""context of a model that knows no positions, for the tables"""
SHORTEST = 512
"""tokens of a row of the tables, where the context has more"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes that costs depend on."""

    dims: AttentionDims
    """attention sizes: of the first layer, where they differ"""
    windows: tuple[int | None, ...]
    """native sliding window per layer, None for full attention"""
    linear: frozenset[int] = frozenset()
    """layers with linear attention of their own, whose states are the same before and after and are not counted"""
    cache_element_bytes: int
    """bytes per element of keys and values"""
    parameters: int
    """stored parameters of the teacher"""
    idle_parameters: int = 0
    """of these, what a token of text does not meet: experts that it is not sent to, and what sees images"""
    has_experts: bool = False
    """tokens are sent to some experts of many"""
    image_parameters: int = 0
    """of these, what sees images, which no stage trains"""
    embedding_parameters: int
    """of these, the input embedding"""
    tied: bool
    """whether the language-model head is the input embedding"""
    attention_parameters: int
    """parameters of one layer's attention, the teacher's"""
    by_layer: tuple[tuple[AttentionDims, int], ...] = ()
    """attention sizes and parameters of each layer, where they differ"""
    intermediate: int
    """width of the feed-forward layer; with experts, mean width of what a token meets"""
    vocabulary: int
    """rows of the language-model head"""
    qk_norm: bool = False
    """whether q and k are normalised"""
    document_masks: bool = False
    """packed rows of this family are trained under masks of all pairs of tokens"""
    scores_written: bool = False
    """its softmax attention writes out the scores of all pairs, since no kernel bounds them"""

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    def at(self, layer: int) -> "Geometry":
        """The same with the attention of one layer."""
        if not self.by_layer:
            return self
        dims, parameters = self.by_layer[layer]
        return dc.replace(self, dims=dims, attention_parameters=parameters)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with."""
        return self.active_parameters if self.tied else self.active_parameters - self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets."""
        return self.parameters - self.idle_parameters


Mixers = list[Mixer | None]
"""mixer of each layer, None for the teacher's attention"""


def table_lengths(context: int | None) -> list[int]:
    """Context lengths of the tables, in tokens: the model's own first, and shorter ones. None knows no positions."""
    longest = context or ENDLESS
    return [longest, *(length for length in (longest // 4, longest // 16) if length >= SHORTEST)]


def added_parameters(dims: AttentionDims, mixer: Mixer | None) -> int:
    """Elements of the new tensors that a mixer adds to one layer."""
    if mixer is None or isinstance(mixer, SlidingMixer):
        return 0
    return sum(tensor.size for tensor in new_tensors(dims, mixer))


def layer_bytes(geometry: Geometry, layer: int, mixer: Mixer | None, length: int) -> int:
    """Cache or state bytes of one layer for one sequence of `length` tokens; formulas at the top of this file."""
    geometry = geometry.at(layer)
    state = state_bytes(geometry, mixer)
    if layer in geometry.linear or (isinstance(mixer, SSEMixer) and not isinstance(mixer, WindowMixer)):
        return state
    window = geometry.windows[layer]
    kept = geometry.dims.cached * (length if window is None else min(length, window - 1))
    if isinstance(mixer, WindowMixer):
        near = own_dims(geometry.dims, mixer).cached
        kept = near * (mixer.window - 1 + mixer.sinks) + (geometry.dims.cached - near) * length
    return state + kept * geometry.cache_element_bytes


def constant_and_growth(geometry: Geometry, layer: int, mixer: Mixer | None) -> tuple[int, int]:
    """Of the cache of a layer for one sequence, bytes that it takes whatever the length, and bytes for each token."""
    far = 1 << 40
    growth = layer_bytes(geometry, layer, mixer, far + 1) - layer_bytes(geometry, layer, mixer, far)
    return layer_bytes(geometry, layer, mixer, far) - far * growth, growth


def state_bytes(geometry: Geometry, mixer: Mixer | None) -> int:
    """Bytes of the recurrent state of one layer for one sequence; 0 where there is none."""
    if not isinstance(mixer, SSEMixer):
        return 0
    return math.prod(state_shape(geometry.dims, mixer)) * STATE_BYTES


def cache_bytes(geometry: Geometry, mixers: Mixers, length: int) -> int:
    """Cache and state bytes of a whole model for one sequence of `length` tokens."""
    return sum(layer_bytes(geometry, layer, mixer, length) for layer, mixer in enumerate(mixers))


def break_even(geometry: Geometry, mixers: Mixers) -> int | None:
    """The shortest length from which the hybrid's cache is never larger than the teacher's; None if there is none."""
    teacher: Mixers = [None] * geometry.layers

    def saved(length: int) -> int:
        return cache_bytes(geometry, teacher, length) - cache_bytes(geometry, mixers, length)

    # the saving is linear between windows and never falls with length: what a converted layer keeps is constant
    high = 1 << 50
    if saved(high) < 0 or all(saved(length) == 0 for length in (1, high)):
        return None
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saved(middle) >= 0 else (middle, high)
    return high


def visible_tokens(length: int, window: int | None) -> float:
    """Mean number of tokens a causal query sees, itself included, over the positions of a sequence."""
    if window is None or window >= length:
        return (length + 1) / 2
    return window - window * (window - 1) / (2 * length)


def mixer_flops(geometry: Geometry, layer: int, mixer: Mixer | None, length: int) -> float:
    """Forward FLOPs per token of one layer's attention beyond the teacher's weights."""
    dims = geometry.at(layer).dims
    recurrent = 0.0
    if layer in geometry.linear:
        return recurrent
    if isinstance(mixer, SSEMixer):
        sse = mixer
        matrix = dims.head_dim * dims.value_dim
        per_write = 5 if sse.update == "delta" else 3
        writes = per_write * (sse.top_k + sse.shared_partition) * state_heads(dims, sse) * matrix
        reads = 2 * (sse.top_k + sse.shared_partition) * own_dims(dims, sse).query_heads * matrix
        recurrent = writes + reads + 2 * added_parameters(dims, mixer)
        if not isinstance(mixer, WindowMixer):
            return recurrent
    window, per_token = geometry.windows[layer], 2 * (dims.head_dim + dims.value_dim)
    near = own_dims(dims, mixer).query_heads if isinstance(mixer, WindowMixer) else 0
    seen = (dims.query_heads - near) * visible_tokens(length, window)
    if isinstance(mixer, WindowMixer):
        seen += near * visible_tokens(length, min(mixer.window + mixer.sinks, window or length))
    return recurrent + per_token * seen


def forward_flops(geometry: Geometry, mixers: Mixers, length: int) -> float:
    """Forward FLOPs per token, averaged over a sequence of `length` tokens."""
    attention = sum(mixer_flops(geometry, layer, mixer, length) for layer, mixer in enumerate(mixers))
    return 2 * geometry.matmul_parameters + attention
