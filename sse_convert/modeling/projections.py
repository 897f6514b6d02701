"""How families make q, k and v of hidden states."""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.attention_dims import AttentionDims


def projections(attention: Any, spec: ArchSpec, dims: AttentionDims, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A family's q [T, Hq*D], k [T, kv heads*D] and v [T, kv heads*V] of x [T, hidden], before norm and rotation."""
    modules = [getattr(attention, name) for name in spec.qkv]
    if spec.qkv_layout == "latent":
        q, k, v = _from_latents(modules, dims, x)
    elif spec.qkv_layout == "separate":
        q, k, *own = (module(x) for module in modules)
        v = own[0] if own else k
        if spec.gated:
            q = split_last(q, dims.query_heads, 2, dims.head_dim).select(-2, 0).flatten(-2)
    elif spec.qkv_layout == "blocks":
        query, key = dims.query_heads * dims.head_dim, dims.kv_heads * dims.head_dim
        q, k, v = modules[0](x).split([query, key, key], dim=-1)
    else:
        heads = split_last(modules[0](x), dims.query_heads, 3, dims.head_dim)
        q, k, v = (part.flatten(-2) for part in heads.unbind(-2))
    return q, k, v


def value_heads(attention: nn.Module, spec: ArchSpec, dims: AttentionDims, flat: Tensor) -> Tensor:
    """A family's v [..., kv heads, V] of projected values [..., kv heads*V], normed if the family norms them."""
    heads = split_last(flat, dims.kv_heads, dims.value_dim)
    return heads if spec.value_norm is None else getattr(attention, spec.value_norm)(heads)


def _from_latents(modules: list[Any], dims: AttentionDims, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of low-rank projections; every head's key ends in the same channels."""
    assert dims.latent is not None
    *query, down, norm, up = modules
    rank, shared = dims.latent.key_value, dims.latent.shared_key
    latent, key_end = torch.split(down(x), [rank, shared], dim=-1)
    expanded = split_last(up(norm(latent)), dims.kv_heads, dims.head_dim - shared + dims.value_dim)
    key_start, v = torch.split(expanded, [dims.head_dim - shared, dims.value_dim], dim=-1)
    k = torch.cat([key_start, key_end[..., None, :].expand(*key_start.shape[:-1], -1)], dim=-1)
    for module in query:
        x = module(x)
    return x, k.flatten(-2), v.flatten(-2)


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dim split."""
    return x.view(*x.shape[:-1], *sizes)


def is_rotated(source: nn.Module, spec: ArchSpec) -> bool:
    """Whether a family rotates q and k in this of its attention modules."""
    window: Any = getattr(source, "sliding_window", None)
    if spec.rotated_layers == "sliding":
        return window is not None
    if spec.rotated_layers == "sliding_if_any":
        return window is None or bool(source.is_sliding)
    return bool(getattr(source, "use_rope", True))
