"""What projections make of one new token per row on a CPU: as one matrix in small layers, else in a few.

Shape letters: B rows, N sparse partitions, K of them that a token uses, R those and the shared one, which comes last,
Hq query heads, H state heads, D key dim, V value dim. Where a field has R, it may have 1 instead, for all of them.
"""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sse_convert.modeling.compat import is_bare
from sse_convert.modeling.initialise import NewProjection, PreciseProjection

OF_INPUT = (
    "sse_router", "sse_delta_q_down", "sse_delta_k_down", "sse_decay_down", "sse_shared_decay_down",
    "sse_write_strength", "sse_shared_write_strength",
)  # fmt: skip
"""new projections of a layer's input that the operator needs"""
OF_THESE = ("sse_delta_q_up", "sse_delta_k_up", "sse_decay_up", "sse_shared_decay_up")
"""new projections of what those make"""
FOLDED = 2 << 20
"""bytes of one matrix for all that a layer makes of its input, up to which reading it beats calling several"""
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "granite")
"""families whose attention is no more than projections, RMS norms of q and k by head, if any, rotation of both, and
softmax of scaled products"""
Flat = tuple[Tensor, Tensor, Tensor]
"""q, k and v as a layer's `project` makes them"""
Rotation = tuple[Tensor, Tensor] | None


@dc.dataclass(slots=True)
class TokenHeads:
    """What projections, norms and rotation make of new tokens."""

    q: Tensor
    """[B, R, Hq, D]"""
    k: Tensor
    """[B, R, H, D]"""
    v: Tensor
    """[B, H, V]"""
    router: Tensor
    """logits [B, N]"""
    decay: Tensor | None
    """gate logits [B, R, H, D], or one for all D"""
    strength: Tensor | None
    """[B, R, H], before the logistic function"""


class Separate:
    """The teacher's projections one by one, the new ones of the input as one matrix.

    Args:
        layer: an SSE layer.
        dtypes: of its inputs, and in which it computes routing, decays and states.
    """

    def __init__(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self._layer, (self._dtype, self._precise) = layer, dtypes
        first, then = new_projections(layer, OF_INPUT), new_projections(layer, OF_THESE)
        self.modules = [*first.values(), *then.values()]
        self._sizes = {name: part.out_features for name, part in first.items()}
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in first.values()]
        self._weight = torch.cat([part.weight.to(self._precise) for part in first.values()])
        self._bias = torch.cat([bias.to(self._precise) for bias in biases])
        self._then = {name: self._weights(part) for name, part in then.items()}

    def _weights(self, part: NewProjection) -> tuple[Tensor, Tensor | None]:
        dtype = self._precise if isinstance(part, PreciseProjection) else self._dtype
        return part.weight.detach().to(dtype), None if part.bias is None else part.bias.detach().to(dtype)

    def is_current(self) -> bool:
        """True: it asks the layer for the teacher's modules each time."""
        return True

    def __call__(self, x: Tensor, flat: Flat | None, rotation: Rotation) -> TokenHeads:
        """Of x [B, hidden]. For the other arguments see `LayerStep`."""
        layer = self._layer
        flat_q, flat_k, v = layer.project(x) if flat is None else flat
        projected = F.linear(x.to(self._precise), self._weight, self._bias)
        parts = torch.split_with_sizes(projected, list(self._sizes.values()), -1)
        made = dict(zip(self._sizes, parts, strict=True))
        q, k = self._queries_and_keys(flat_q, layer.groups(flat_k), made)
        return TokenHeads(
            q=layer.queries(q, rotation),
            k=layer.keys(k, rotation),
            v=layer.values(v),
            router=made["sse_router"],
            decay=self._decay(made),
            strength=self._strength(made),
        )

    def _queries_and_keys(self, q: Tensor, k: Tensor, made: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Projections of q [B, R, Hq*D] and k [B, R, kv heads, keys that each has, D]."""
        if not self._layer.mixer.qk_rank:
            return q[:, None], k[:, None]
        side_q, side_k = self._up("sse_delta_q", made), self._layer.groups(self._up("sse_delta_k", made))
        return self._rows(q, q + side_q), self._rows(k.expand_as(side_k), k + side_k)

    def _decay(self, made: dict[str, Tensor]) -> Tensor | None:
        if self._layer.mixer.decay == "none":
            return None
        separate = self._layer.mixer.decay_params == "separate"
        rows = self._rows(self._up("sse_decay", made), self._up("sse_shared_decay", made) if separate else None)
        return rows.view(*rows.shape[:2], self._layer.state_heads, -1)

    def _strength(self, made: dict[str, Tensor]) -> Tensor | None:
        if "sse_write_strength" not in made:
            return None
        return self._rows(made["sse_write_strength"], made.get("sse_shared_write_strength"))

    def _up(self, name: str, made: dict[str, Tensor]) -> Tensor:
        """What the two factors of a low rank make of the input."""
        weight, bias = self._then[f"{name}_up"]
        return F.linear(made[f"{name}_down"].to(weight.dtype), weight, bias)

    def _rows(self, own: Tensor, shared: Tensor | None) -> Tensor:
        """[B, R, ...] of what the sparse partitions have, and of what the shared one has; [B, 1, ...] for None."""
        return own[:, None] if shared is None else torch.stack([*[own] * self._layer.mixer.top_k, shared], 1)


class Folded:
    """All that a small layer of a plain family makes of its input as one matrix: the teacher's projections, products of
    low ranks, and once for each of R what it has of them; q and k under one norm and one rotation.

    Args:
        layer: an SSE layer that `folds`.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._named = layer, _teachers(layer)
        self.modules = [*self._named.values(), *new_projections(layer).values()]
        (q, k, v, *_), each = (_affine(part) for part in self._named.values()), layer.state_heads
        k, v = (_for_each_state(part, layer.dims.kv_heads, each) for part in (k, v))
        heads = torch.cat([q, k])
        side_q, side_k = _product(layer, "sse_delta_q"), _product(layer, "sse_delta_k")
        both = None if side_q is None or side_k is None else heads + torch.cat([side_q, side_k])
        rows = {"heads": self._rows(heads, both), "v": [v], "router": [_affine(layer.sse_router)]}
        for name, affine in (("decay", _product), ("write_strength", _of_name)):
            own, shared = (affine(layer, f"sse_{which}{name}") for which in ("", "shared_"))
            rows[name] = [] if own is None else self._rows(own, shared)
        whole = torch.cat([row for part in rows.values() for row in part])
        self._weight, self._bias = whole[:, :-1].contiguous(), whole[:, -1].contiguous()
        self._counts = [len(part) for part in rows.values()]
        self._sizes = [sum(len(row) for row in part) for part in rows.values()]
        self._split = [layer.dims.query_heads, each]
        self._norm = self._norm_of(layer) if layer.spec.qk_norm == "head" else None

    def _rows(self, own: Tensor, shared: Tensor | None) -> list[Tensor]:
        return [own] if shared is None else [*[own] * self._layer.mixer.top_k, shared]

    def _norm_of(self, layer: Any) -> tuple[Tensor, float]:
        """Weights of the norms of q and k [Hq + H, D], and what they add to the mean square."""
        norms = [self._named[name] for name in layer.spec.qk_norms]
        weights = [norm.weight.detach().expand(heads, -1) for norm, heads in zip(norms, self._split, strict=True)]
        return torch.cat(weights), norms[0].variance_epsilon

    def is_current(self) -> bool:
        """Whether the layer's modules are those that it was made of, with nothing around them."""
        return all(getattr(self._layer, name) is part and _unhooked(part) for name, part in self._named.items())

    def __call__(self, x: Tensor, flat: Flat | None, rotation: Rotation) -> TokenHeads:
        """Of x [B, hidden]; `flat`, which it makes too, is not used. For `rotation` see `LayerStep`."""
        batch, (query_heads, state_heads) = len(x), self._split
        parts = F.linear(x, self._weight).add_(self._bias).split_with_sizes(self._sizes, 1)
        heads, v, router, decay, strength = parts
        heads = heads.view(batch, self._counts[0], query_heads + state_heads, -1)
        if self._norm is not None:
            weight, eps = self._norm
            heads = F.rms_norm(heads, weight.shape[1:], None, eps) * weight
        q, k = self._layer.rotated(heads, rotation).split_with_sizes(self._split, 2)
        return TokenHeads(
            q=q,
            k=k,
            v=v.view(batch, state_heads, -1),
            router=router,
            decay=decay.view(batch, self._counts[3], state_heads, -1) if self._counts[3] else None,
            strength=strength.view(batch, self._counts[4], state_heads) if self._counts[4] else None,
        )


def folds(layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Whether one matrix is to hold all projections of a layer: it is small, of a plain family, and all in float32.

    Args:
        layer: an SSE layer, whose new projections are no more than their weights.
        dtypes: of its inputs, and in which it computes routing, decays and states.
    """
    plain = layer.spec.model_type in PLAIN_ATTENTION and layer.mixer.row_top_k is None
    if not plain or dtypes != (torch.float32, torch.float32):  # norms are in float32 whatever their input is
        return False
    teachers = _teachers(layer)
    projections = [teachers[name] for name in layer.spec.qkv]
    bare = all(type(part) is nn.Linear and is_bare(part) for part in projections) and len(projections) == 3
    if not bare or not all(_unhooked(part) for part in teachers.values()):
        return False
    rows = 1 if layer.mixer.qk_rank == 0 else layer.mixer.top_k + 1
    weights = [p for part in (*teachers.values(), *new_projections(layer).values()) for p in part.parameters()]
    small = rows * sum(part.weight.nbytes for part in projections) <= FOLDED
    return small and all(p.dtype == torch.float32 and p.device.type == "cpu" and not p.is_inference() for p in weights)


def _teachers(layer: Any) -> dict[str, Any]:
    """Name -> module of q, k, v and their norms."""
    norms = layer.spec.qk_norms if layer.spec.qk_norm == "head" else ()
    return {name: getattr(layer, name) for name in (*layer.spec.qkv, *norms)}


def _unhooked(module: nn.Module) -> bool:
    """Whether nobody waits for a module to be called. Its forward may be another with the same results."""
    return not (module._forward_hooks or module._forward_pre_hooks)


def _affine(part: Any) -> Tensor:
    """A projection's weight [out, in], and its bias as one more column; of a norm its weight."""
    weight: Tensor = part.weight.detach()
    if weight.dim() == 1:
        return weight
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


def _for_each_state(rows: Tensor, kv_heads: int, state_heads: int) -> Tensor:
    """Rows [kv heads * D, in] of keys or values, once for each state that they feed: [H*D, in]."""
    return rows.unflatten(0, (kv_heads, -1)).repeat_interleave(state_heads // kv_heads, 0).flatten(0, 1)


def new_projections(layer: Any, names: tuple[str, ...] = (*OF_INPUT, *OF_THESE)) -> dict[str, Any]:
    """Name -> new projection of a layer, of those that it has."""
    return {name: getattr(layer, name) for name in names if hasattr(layer, name)}
