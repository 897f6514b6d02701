"""One matrix for all that a small layer makes of one new token per row on a CPU: the teacher's projections, products of
low ranks, and what the shared partition has of its own. Each is there once; columns are repeated afterwards.

Shape letters as in `token_heads`; E = Hq + H heads of q and of k.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.kernels.feature_maps import key_feature_map
from sse_convert.modeling.compat import has_hooks, is_bare
from sse_convert.modeling.token_heads import Flat, Rotation, TokenHeads, has_window, new_projections

FOLDED = 2 << 20
"""bytes of the teacher's projections, for all partitions and for the shared one, up to which reading one matrix beats
calling several"""
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "granite")
"""families whose attention is no more than projections, RMS norms of q and k by head, if any, rotation of both, and
softmax of scaled products"""


class OneMatrix:
    """Projections side by side, each asked for by the numbers of its columns in what the whole makes."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._width = 0

    def add(self, affine: Tensor) -> Tensor:
        """Append a projection [out, in + 1], the bias last; int64 [out], the numbers of what it makes."""
        first, self._width = self._width, self._width + len(affine)
        self._parts.append(affine)
        return torch.arange(first, self._width)

    def whole(self) -> tuple[Tensor, Tensor]:
        """The weight of all [in, out], as one row times it is fastest, and the bias [out]."""
        together = torch.cat(self._parts)
        return together[:, :-1].t().contiguous(), together[:, -1].contiguous()


class Folded:
    """Makes what `Separate` does, by one matrix; q and k of all partitions and of the window under one norm.

    Args:
        layer: an SSE layer that `folds`.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._named = layer, _teachers(layer)
        self.modules = [*self._named.values(), *new_projections(layer).values()]
        self._k_scale, self._k_map = layer.sse_k_scale, layer.mixer.k_feature_map
        self._window = has_window(layer)
        self._turns = self._window and not layer.rotates and layer.spec.rotary_pairs == "halves"
        columns = OneMatrix()
        heads, v = self._heads_of(columns)
        router, own = columns.add(_affine(layer.sse_router)), self._repeated(columns, "decay", _product)
        parts = [heads, v, router, own, self._repeated(columns, "write_strength", _of_name)]
        self._decays = len(own)
        self._index, self._sizes = torch.cat([part.flatten() for part in parts]), [part.numel() for part in parts]
        self._weight, self._bias = columns.whole()
        self._rows, self._split = len(heads), [layer.dims.query_heads, layer.state_heads]
        self._before = [1] * (self._window + self._turns)
        self._eps = self._norms()
        self._least = None if self._eps is None else torch.tensor((layer.dims.head_dim * self._eps) ** 0.5)
        self._gain_RED = self._gains()

    def _heads_of(self, columns: OneMatrix) -> tuple[Tensor, Tensor]:
        """Numbers of q and k: rows [E, D] of the window, as they are and turned, and of the partitions; and of v."""
        layer, dim, states = self._layer, self._layer.dims.head_dim, self._layer.state_heads
        q, k, v = (_affine(self._named[name]) for name in layer.spec.qkv)
        own_q, own_k, own_v = (columns.add(part) for part in (q, k, v))
        each = states // layer.dims.kv_heads
        own = torch.cat([own_q, _for_each_state(own_k, dim, each)]).view(-1, dim)
        rows, side = [own], [_product(layer, name) for name in ("sse_delta_q", "sse_delta_k")]
        if side[0] is not None and side[1] is not None:
            shared = columns.add(torch.cat([q + side[0], _for_each_state(k, dim, each) + side[1]]))
            rows = [*[own] * layer.mixer.top_k, shared.view(-1, dim)]
        before = [own, own.roll(dim // 2, 1)][: self._window + self._turns]
        return torch.stack([*before, *rows]), _for_each_state(own_v, layer.dims.value_dim, each)

    def _repeated(self, columns: OneMatrix, name: str, affine: Any) -> Tensor:
        """Numbers of what partitions have under a name, [R or 1 or 0, out]."""
        own, shared = (affine(self._layer, f"sse_{which}{name}") for which in ("", "shared_"))
        if own is None:
            return torch.empty(0, 0, dtype=torch.int64)
        first = columns.add(own)
        return first[None] if shared is None else torch.stack([*[first] * self._layer.mixer.top_k, columns.add(shared)])

    def _norms(self) -> float | None:
        """What the norms of q and k add to the mean square; None for no norms."""
        by_head = self._layer.spec.qk_norm == "head"
        return float(self._named[self._layer.spec.qk_norms[0]].variance_epsilon) if by_head else None

    def _gains(self) -> Tensor:
        """What each row of heads [E, D] is multiplied by: weights of norms, and the operator's scales."""
        layer, dim = self._layer, self._layer.dims.head_dim
        norms = [self._k_scale.new_ones(dim)] * 2
        if self._eps is not None:
            norms = [self._named[name].weight.detach() * dim**0.5 for name in layer.spec.qk_norms]
        own = torch.cat([norm.expand(heads, -1) for norm, heads in zip(norms, self._split, strict=True)])
        scale = torch.cat([torch.full((self._split[0],), dim**-0.5), self._k_scale.detach()])
        turned = own.roll(dim // 2, 1) * torch.cat([-torch.ones(dim // 2), torch.ones(dim - dim // 2)])
        before = [own, turned][: len(self._before)]
        return torch.stack([*before, *[own * scale[:, None]] * (self._rows - len(before))])

    def is_current(self) -> bool:
        """Whether the layer's modules are those that it was made of, with nothing around them."""
        layer, here = self._layer, self._layer.sse_k_scale is self._k_scale
        return here and all(getattr(layer, name) is part and not has_hooks(part) for name, part in self._named.items())

    def __call__(self, x: Tensor, flat: Flat | None, rotation: Rotation, window: Rotation) -> TokenHeads:
        """Of x [B, hidden]; `flat`, which it makes too, is not used. For the rotations see `LayerStep`."""
        batch, (_, state_heads) = len(x), self._split
        made = torch.addmm(self._bias, x, self._weight).index_select(1, self._index)
        heads, v, router, decay, strength = made.split_with_sizes(self._sizes, 1)
        heads = heads.view(batch, *self._gain_RED.shape)
        if self._least is not None:
            heads = heads / torch.hypot(torch.linalg.vector_norm(heads, dim=-1, keepdim=True), self._least)
        heads = heads * self._gain_RED
        if rotation is not None:
            heads = self._layer.rotated(heads, rotation)
        *before, heads = heads.split_with_sizes([*self._before, self._rows - len(self._before)], 1)
        q, k = heads.split_with_sizes(self._split, 2)
        return TokenHeads(
            q=q,
            k=key_feature_map(k, self._k_map),
            v=v.view(batch, state_heads, -1),
            router=router,
            decay=decay.view(batch, self._decays, state_heads, -1) if self._sizes[3] else None,
            strength=strength.view(batch, -1, state_heads) if self._sizes[4] else None,
            own=self._own(before, window) if before else None,
        )

    def _own(self, before: list[Tensor], window: Rotation) -> Tensor:
        """q and k of the window [B, E, D], rotated."""
        own: Tensor = before[0].select(1, 0)
        if window is None or not self._turns or window[0].shape[-1] != own.shape[-1]:
            own = self._layer.rotated(own, window)
            return own
        return torch.addcmul(own * window[0], before[1].select(1, 0), window[1])


def folds(layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Whether one matrix is to hold all projections of a layer: it is small, of a plain family, and all in float32.

    Args:
        layer: an SSE layer, whose new projections are no more than their weights.
        dtypes: of its inputs, and in which it computes routing, decays and states.
    """
    plain = layer.spec.model_type in PLAIN_ATTENTION and layer.dims == layer.source_dims
    if not plain or dtypes != (torch.float32, torch.float32):  # norms are in float32 whatever their input is
        return False
    teachers = _teachers(layer)
    projections = [teachers[name] for name in layer.spec.qkv]
    bare = all(type(part) is nn.Linear and is_bare(part) for part in projections) and len(projections) == 3
    if not bare or any(has_hooks(part) for part in teachers.values()):  # a norm's forward may be a faster one
        return False
    copies = 1 if layer.mixer.qk_rank == 0 else 2
    weights = [p for part in (*teachers.values(), *new_projections(layer).values()) for p in part.parameters()]
    small = copies * sum(part.weight.nbytes for part in projections) <= FOLDED
    return small and all(p.dtype == torch.float32 and p.device.type == "cpu" and not p.is_inference() for p in weights)


def _teachers(layer: Any) -> dict[str, Any]:
    """Name -> module of q, k, v and their norms."""
    norms = layer.spec.qk_norms if layer.spec.qk_norm == "head" else ()
    return {name: getattr(layer, name) for name in (*layer.spec.qkv, *norms)}


def _affine(part: Any) -> Tensor:
    """A projection's weight [out, in], and its bias as one more column."""
    weight: Tensor = part.weight.detach()
    bias = weight.new_zeros(len(weight)) if part.bias is None else part.bias.detach()
    return torch.cat([weight, bias[:, None]], 1)


def _of_name(layer: Any, name: str) -> Tensor | None:
    return _affine(getattr(layer, name)) if hasattr(layer, name) else None


def _product(layer: Any, name: str) -> Tensor | None:
    """As `_affine`, of both factors of a low rank; None where the layer has none."""
    up, down = _of_name(layer, f"{name}_up"), _of_name(layer, f"{name}_down")
    if up is None or down is None:
        return None
    product = up[:, :-1] @ down
    product[:, -1] += up[:, -1]
    return product


def _for_each_state(rows: Tensor, dim: int, each: int) -> Tensor:
    """Rows [kv heads * dim, ...] of keys or values, once for each state that they feed: [H * dim, ...]."""
    return rows.view(-1, dim, *rows.shape[1:]).repeat_interleave(each, 0).flatten(0, 1)
