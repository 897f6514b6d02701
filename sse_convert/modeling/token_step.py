"""A layer's step of one new token per row on a CPU, where what counts is the number of operators, and of calls around
them: the new projections of the layer's input run as one, what the partitions need of q and k is made for all at once.

Shape letters: B rows, K sparse partitions that a token uses, R those and the shared one, which comes last, Hq query
heads, H state heads, D key dim, V value dim, M partitions in the state.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.gates import SOFTMAX
from sse_convert.kernels.routing import best_partitions
from sse_convert.kernels.torch.step import TokenInputs, advance_states, decays, mapped_keys, used_partitions
from sse_convert.modeling.compat import is_bare, version
from sse_convert.modeling.initialise import NewProjection, PreciseProjection, precise_dtype
from sse_convert.modeling.layout import SequenceLayout

OF_INPUT = (
    "sse_router", "sse_delta_q_down", "sse_delta_k_down", "sse_decay_down", "sse_shared_decay_down",
    "sse_write_strength", "sse_shared_write_strength",
)  # fmt: skip
"""new projections of a layer's input that the operator needs"""
OF_THESE = ("sse_delta_q_up", "sse_delta_k_up", "sse_decay_up", "sse_shared_decay_up")
"""new projections of what those make"""
Rotation = tuple[Tensor, Tensor] | None


def takes_steps(layer: Any, x: Tensor, layout: SequenceLayout, state: Tensor) -> bool:
    """Whether `LayerStep` computes this: new tokens x [B, hidden], one for each row, on a CPU, without gradients;
    partitions that share projections, and are written where they are read; a state in one piece."""
    alone = layout.max_seqlen == 1 and layout.tokens is None and layout.real is None
    if not alone or x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    mixer = layer.mixer
    plain = mixer.shared_params and mixer.partition_gate == SOFTMAX and mixer.read_top_k in (None, mixer.top_k)
    kept = state.is_contiguous() and state.dtype == precise_dtype(x) and not torch.is_autocast_enabled("cpu")
    return plain and kept and mixer.num_partitions > 1 and layer.backend in ("auto", "recurrent")


class StepKeeper:
    """The step of a layer, beside the state that it changes: made anew when the layer's weights change. Left out of
    copies and pickles."""

    def __init__(self) -> None:
        self._step: LayerStep | None = None

    def of(self, layer: Any, x: Tensor) -> "LayerStep | None":
        """That of a layer for inputs like x; None where something stands around one of its projections."""
        dtypes = x.dtype, precise_dtype(x)
        if self._step is None or not self._step.is_current(layer, dtypes):
            self._step = LayerStep(layer, dtypes) if _is_plain(layer) else None
        return self._step

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return StepKeeper, ()


class LayerStep:
    """What a layer does with one new token per row, with a copy of its new projections.

    Args:
        layer: an SSE layer.
        dtypes: of its inputs, and in which it computes routing, decays and states.
    """

    def __init__(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self._layer, (self._dtype, self._precise) = layer, dtypes
        first, then = _projections(layer, OF_INPUT), _projections(layer, OF_THESE)
        self._watched = [p for part in (*first.values(), *then.values()) for p in part.parameters()]
        self._versions = [version(weight) for weight in self._watched]
        self._sizes = {name: part.out_features for name, part in first.items()}
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in first.values()]
        self._weight = torch.cat([part.weight.to(self._precise) for part in first.values()])
        self._bias = torch.cat([bias.to(self._precise) for bias in biases])
        self._then = {name: self._weights(part) for name, part in then.items()}

    def _weights(self, part: NewProjection) -> tuple[Tensor, Tensor | None]:
        dtype = self._precise if isinstance(part, PreciseProjection) else self._dtype
        return part.weight.detach().to(dtype), None if part.bias is None else part.bias.detach().to(dtype)

    def is_current(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
        """Whether it is of this layer with the weights that it has now."""
        same = self._layer is layer and (self._dtype, self._precise) == dtypes
        return same and [version(weight) for weight in self._watched] == self._versions

    def __call__(
        self, x: Tensor, flat: tuple[Tensor, Tensor, Tensor], rotation: Rotation, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs [B, Hq, V] and router logits [B, N]; the state is overwritten.

        Args:
            x: [B, hidden].
            flat: q, k and v that the layer's `project` makes of x.
            rotation: (cos, sin), each [B, 1, rotated dims]; None for no rotation.
            state: [B, M, H, D, V].
        """
        layer, mixer, dtype = self._layer, self._layer.mixer, self._precise
        projected = F.linear(x.to(dtype), self._weight, self._bias)
        parts = torch.split_with_sizes(projected, list(self._sizes.values()), -1)
        made = dict(zip(self._sizes, parts, strict=True))
        e, order = best_partitions(made["sse_router"], mixer.top_k, getattr(layer, "sse_router_bias", None))
        shared = mixer.num_partitions if mixer.shared_partition else None
        used_BR, weight_BR = used_partitions(e, order, shared, renormalise=mixer.gate.renormalise)
        (q, k), v = self._queries_and_keys(flat, made, rotation), layer.values(flat[2])
        keys = layer.mapping_options()
        tokens = TokenInputs(
            used_BR=used_BR,
            weight_BR=weight_BR,
            q_BRQD=q.to(dtype),
            k_BRHD=mapped_keys(k, keys["k_map"], keys["k_scale"], dtype),
            v_BRHV=v[:, None].to(dtype),
            decay_BRHD=decays(self._log_decay(made), keys["decay_normalizer"], dtype),
            strength_BRH=self._strength(made),
        )
        o = advance_states(
            state, tokens, write_gate=mixer.gate.write, read_gate=mixer.gate.read, scale=layer.dims.head_dim**-0.5
        )
        return o.to(v.dtype), made["sse_router"]

    def _queries_and_keys(
        self, flat: tuple[Tensor, Tensor, Tensor], made: dict[str, Tensor], rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """q [B, R or 1, Hq, D] and k [B, R or 1, H, D]."""
        layer, q, k = self._layer, flat[0], self._layer.groups(flat[1])
        if not layer.mixer.qk_rank:
            return layer.queries(q[:, None], rotation), layer.keys(k[:, None], rotation)
        side_q, side_k = self._up("sse_delta_q", made), layer.groups(self._up("sse_delta_k", made))
        own_q, own_k = self._rows(q, q + side_q), self._rows(k.expand_as(side_k), k + side_k)
        return layer.queries(own_q, rotation), layer.keys(own_k, rotation)

    def _log_decay(self, made: dict[str, Tensor]) -> Tensor:
        """[B, R or 1, H, D or 1] gate logits; zeros, as log decays, for no decay."""
        layer, mixer = self._layer, self._layer.mixer
        if mixer.decay == "none":
            return self._bias.new_zeros(1, 1, 1, 1)
        own_decay = self._up("sse_shared_decay", made) if mixer.decay_params == "separate" else None
        rows = self._rows(self._up("sse_decay", made), own_decay)
        return rows.view(*rows.shape[:2], layer.state_heads, -1)

    def _strength(self, made: dict[str, Tensor]) -> Tensor | None:
        """[B, R or 1, H]."""
        if "sse_write_strength" not in made:
            return None
        return torch.sigmoid(self._rows(made["sse_write_strength"], made.get("sse_shared_write_strength")))

    def _up(self, name: str, made: dict[str, Tensor]) -> Tensor:
        """What the two factors of a low rank make of the input."""
        weight, bias = self._then[f"{name}_up"]
        return F.linear(made[f"{name}_down"].to(weight.dtype), weight, bias)

    def _rows(self, own: Tensor, shared: Tensor | None) -> Tensor:
        """[B, R, ...] of what the sparse partitions have, and of what the shared one has; [B, 1, ...] for None."""
        return own[:, None] if shared is None else torch.stack([*[own] * self._layer.mixer.top_k, shared], 1)


def _projections(layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in names if hasattr(layer, name)}


def _is_plain(layer: Any) -> bool:
    """Whether a layer's new projections are no more than their weights, which are at hand."""
    parts = _projections(layer, (*OF_INPUT, *OF_THESE)).values()
    known = all(type(part) in (NewProjection, PreciseProjection) and is_bare(part) for part in parts)
    return known and all(p.device.type == "cpu" and not p.is_inference() for part in parts for p in part.parameters())
