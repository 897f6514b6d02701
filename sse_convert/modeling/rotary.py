"""Rotary embeddings as families apply them: which layers have them, and how pairs of dimensions turn."""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.modeling.arch_spec import ArchSpec

RotaryTables = tuple[Tensor, Tensor] | Tensor
"""(cos, sin) of a forward's positions, or both as one complex tensor"""


def is_rotated(source: nn.Module, spec: ArchSpec) -> bool:
    """Whether a family rotates q and k in this of its attention modules."""
    window: Any = getattr(source, "sliding_window", None)
    if spec.rotated_layers == "sliding":
        return window is not None
    if spec.rotated_layers == "sliding_if_any":
        return window is None or bool(source.is_sliding)
    return bool(getattr(source, "use_rope", True))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor] | None, spec: ArchSpec) -> Tensor:
    """x [T, (N,) heads, D] with its first dims rotated, or its last, as many as (cos, sin) [T, 1, dims] cover."""
    if rotation is None:
        return x
    cos, sin = rotation if x.dim() == 3 else (part[:, None] for part in rotation)
    pairs = spec.rotary_pairs
    if pairs == "halves_once":
        cos, sin = (torch.cat([part, part], dim=-1) for part in (cos, sin))
    if pairs == "neighbours_once":
        cos, sin = (part.repeat_interleave(2, dim=-1) for part in (cos, sin))
    dims = cos.shape[-1]
    if pairs == "neighbours_from_halves":
        cos, sin = (part[..., : dims // 2].repeat_interleave(2, dim=-1) for part in (cos, sin))
    if dims == x.shape[-1]:
        return (_in_halves(x, pairs) * cos + quarter_turn(x, pairs) * sin).to(x.dtype)
    first = x.shape[-1] - dims if spec.rotary == "last" else 0
    before, turning, after = torch.split(x, [first, dims, x.shape[-1] - first - dims], dim=-1)
    turned = _in_halves(turning, pairs) * cos + quarter_turn(turning, pairs) * sin
    return torch.cat([before, turned, after], dim=-1).to(x.dtype)


def _in_halves(x: Tensor, pairs: str) -> Tensor:
    """x [..., dims] with the first of each pair of neighbours in the first half, where `pairs` leave them so."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if pairs == "neighbours_to_halves" else x


def quarter_turn(x: Tensor, pairs: str) -> Tensor:
    """x [..., dims] with each pair of dimensions turned by 90 degrees; for `pairs` see `ArchSpec.rotary_pairs`."""
    if pairs == "neighbours_to_halves":
        return torch.cat([-x[..., 1::2], x[..., ::2]], dim=-1)
    if pairs.startswith("neighbours"):
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, -first] if pairs == "backwards" else [-second, first], dim=-1)
