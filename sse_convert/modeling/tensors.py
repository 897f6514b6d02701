"""The new tensors of an SSE layer, as data: one table for planning, conversion and the layer itself.

`dims` are those of the whole layer, also where some of its heads stay softmax.
"""

import dataclasses as dc
import math

from sse_convert.mixers import Mixer, SSEMixer, SSESlidingMixer
from sse_convert.modeling.attention_dims import AttentionDims

DECAY_RANK = 16
"""rank of the projections of per-channel decays"""


@dc.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A new tensor of an SSE layer."""

    name: str
    """name below the attention module"""
    shape: tuple[int, ...]
    """`.weight` of a projection is [out, in]"""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def own_dims(dims: AttentionDims, mixer: Mixer) -> AttentionDims:
    """Sizes of the part of a layer that a mixer replaces: without key-value heads that see the whole row."""
    full = getattr(mixer, "full_heads", ())
    return dims.without(len(full)) if full else dims


def own_query_heads(dims: AttentionDims, mixer: Mixer) -> list[int]:
    """Query heads of the part of a layer that a mixer replaces."""
    full, each = getattr(mixer, "full_heads", ()), dims.query_heads // dims.kv_heads
    return [head for head in range(dims.query_heads) if head // each not in full]


def state_heads(dims: AttentionDims, mixer: SSEMixer) -> int:
    """H, the number of states per partition."""
    dims = own_dims(dims, mixer)
    return dims.query_heads if mixer.state_heads == "query" else dims.kv_heads


def state_shape(dims: AttentionDims, mixer: SSEMixer) -> tuple[int, int, int, int]:
    """[partitions, H, D, V] of the float32 state that one sequence keeps; the shared partition comes last."""
    partitions = mixer.num_partitions + mixer.shared_partition
    return partitions, state_heads(dims, mixer), dims.head_dim, dims.value_dim


def new_tensors(dims: AttentionDims, mixer: SSEMixer) -> list[TensorSpec]:
    """The tensors that a layer with this mixer adds to the teacher's, in a fixed order.

    Every trainable one gets a gradient in every step: what the mixer does not use is not created (N = 1 has no router).
    """
    partitions, hidden, heads = mixer.num_partitions, dims.hidden, state_heads(dims, mixer)
    dims = own_dims(dims, mixer)
    query, key, output = dims.query_heads * dims.head_dim, heads * dims.head_dim, dims.query_heads * dims.value_dim
    tensors: list[TensorSpec] = []
    if partitions > 1:
        tensors.append(TensorSpec("sse_router.weight", (partitions, hidden)))
    if mixer.qk_rank:
        tensors += _low_rank("sse_delta_q", hidden, mixer.qk_rank, query, bias=False)
        tensors += _low_rank("sse_delta_k", hidden, mixer.qk_rank, key, bias=False)
    decay = key if mixer.decay == "gla" else heads
    tensors += _low_rank("sse_decay", hidden, DECAY_RANK, decay, bias=True)
    if mixer.decay_params == "separate":
        tensors += _low_rank("sse_shared_decay", hidden, DECAY_RANK, decay, bias=True)
    if mixer.update == "delta":
        tensors += _linear("sse_write_strength", hidden, heads)
        if mixer.shared_partition and mixer.decay_params == "separate":
            tensors += _linear("sse_shared_write_strength", hidden, heads)
    tensors += [TensorSpec("sse_out_scale", (output,)), TensorSpec("sse_k_scale", (heads,))]
    if isinstance(mixer, SSESlidingMixer):
        tensors.append(TensorSpec("sse_window_scale", (dims.query_heads,)))
    return tensors


def _linear(name: str, inputs: int, outputs: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (outputs, inputs)), TensorSpec(f"{name}.bias", (outputs,))]


def _low_rank(name: str, inputs: int, rank: int, outputs: int, *, bias: bool) -> list[TensorSpec]:
    tensors = [TensorSpec(f"{name}_down.weight", (rank, inputs)), TensorSpec(f"{name}_up.weight", (outputs, rank))]
    return [*tensors, TensorSpec(f"{name}_up.bias", (outputs,))] if bias else tensors
