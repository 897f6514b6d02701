"""What projections make of one new token per row on a CPU, in few matrices; small layers have one (`token_fold`).

Shape letters: B rows, N sparse partitions, K of them that a token uses, R those and the shared one, which comes last,
Hq query heads, H state heads, D key dim, V value dim. Where a field has R, it may have 1 instead, for all of them.
"""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.torch.step import mapped_keys
from sse_convert.modeling.initialise import NewProjection, PreciseProjection

OF_INPUT = (
    "sse_router", "sse_delta_q_down", "sse_delta_k_down", "sse_decay_down", "sse_shared_decay_down",
    "sse_write_strength", "sse_shared_write_strength",
)  # fmt: skip
"""new projections of a layer's input that the operator needs"""
OF_THESE = ("sse_delta_q_up", "sse_delta_k_up", "sse_decay_up", "sse_shared_decay_up")
"""new projections of what those make"""
Flat = tuple[Tensor, Tensor, Tensor]
"""q, k and v as a layer's `project` makes them"""
Rotation = tuple[Tensor, Tensor] | None


@dc.dataclass(slots=True)
class TokenHeads:
    """What projections, norms and rotation make of new tokens."""

    q: Tensor
    """[B, R, Hq, D], in the dtype of states, times D ** -0.5"""
    k: Tensor
    """[B, R, H, D], in that dtype, mapped"""
    v: Tensor
    """[B, H, V]"""
    router: Tensor
    """logits [B, N]"""
    decay: Tensor | None
    """gate logits [B, R, H, D], or one for all D"""
    strength: Tensor | None
    """[B, R, H], before the logistic function"""
    own: Tensor | None
    """q and k of the window [B, Hq + H, D], normed and rotated; None for no window"""


class Separate:
    """The teacher's projections one by one, the new ones of the input as one matrix.

    Args:
        layer: an SSE layer.
        dtypes: of its inputs, and in which it computes routing, decays and states.
    """

    def __init__(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self._layer, (self._dtype, self._precise) = layer, dtypes
        first, then = new_projections(layer, OF_INPUT), new_projections(layer, OF_THESE)
        self.modules, self._window = [*first.values(), *then.values()], has_window(layer)
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

    def __call__(self, x: Tensor, flat: Flat | None, rotation: Rotation, window: Rotation) -> TokenHeads:
        """Of x [B, hidden]. For the other arguments see `LayerStep`."""
        layer, keys = self._layer, self._layer.mapping_options()
        flat_q, flat_k, v = layer.project(x) if flat is None else flat
        projected = F.linear(x.to(self._precise), self._weight, self._bias)
        parts = torch.split_with_sizes(projected, list(self._sizes.values()), -1)
        made = dict(zip(self._sizes, parts, strict=True))
        q, k = self._queries_and_keys(flat_q, layer.groups(flat_k), made)
        q, k = layer.queries(q, rotation), layer.keys(k, rotation)
        return TokenHeads(
            q=q.to(self._precise) * layer.dims.head_dim**-0.5,
            k=mapped_keys(k, keys["k_map"], keys["k_scale"], self._precise),
            v=layer.values(v),
            router=made["sse_router"],
            decay=self._decay(made),
            strength=self._strength(made),
            own=layer.rotated(torch.cat([q[:, 0], k[:, 0]], 1), window) if self._window else None,
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


def has_window(layer: Any) -> bool:
    """Whether an SSE layer has a window branch, which takes its q, k and v from the same projections."""
    return hasattr(layer, "sse_window_scale")


def new_projections(layer: Any, names: tuple[str, ...] = (*OF_INPUT, *OF_THESE)) -> dict[str, Any]:
    """Name -> new projection of a layer, of those that it has."""
    return {name: getattr(layer, name) for name in names if hasattr(layer, name)}
