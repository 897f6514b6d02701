"""Tensor parallelism of SSE layers: each device has some of the heads, of their states and of the tensors per head.

Routers and the inner sides of low-rank projections are whole on every device, so that all route alike. Where there are
more devices than key-value heads, several have the same one, as in the engines' own attention.
"""

import copy
import dataclasses as dc
from typing import Any

from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.modeling.attention_dims import AttentionDims


def local_dims(dims: AttentionDims, devices: int) -> AttentionDims:
    """The sizes of one device's part of a layer.

    Raises:
        UsageError: the heads cannot be divided so.
    """
    query, kv = dims.query_heads, dims.kv_heads
    if query % devices or (kv % devices and devices % kv):
        raise UsageError(
            f"{query} query heads and {kv} key-value heads on {devices} devices",
            expected="a number of devices that divides both, or that the key-value heads divide",
            fix="choose another tensor parallel size",
        )
    return dc.replace(dims, query_heads=query // devices, kv_heads=max(1, kv // devices))


def local_config(config: Any, dims: AttentionDims) -> Any:
    """A model's configuration with the heads of one device's part."""
    local = copy.copy(config)
    local.num_attention_heads, local.num_key_value_heads = dims.query_heads, dims.kv_heads
    local.head_dim = dims.head_dim
    return local


def own_part(tensor: Tensor, shape: tuple[int, ...], rank: int, devices: int) -> Tensor:
    """The part of a stored tensor that one device has: in each dimension that is shorter there, its heads.

    Args:
        tensor: as the checkpoint has it.
        shape: that of the device's own.
        rank: of the device.
        devices: how many there are.
    """
    for dim, (whole, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if whole != size:
            tensor = tensor.narrow(dim, rank * whole // devices // size * size, size)
    return tensor
