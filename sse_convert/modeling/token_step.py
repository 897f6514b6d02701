"""A layer's step of one new token per row on a CPU, where what counts is the number of operators, and of calls around
them: what the partitions need of the input is made for all at once (see `token_heads`).

Shape letters: B rows, N sparse partitions, M partitions in the state, Hq query heads, H state heads, D key dim, V value
dim.
"""

from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.torch.step import TokenInputs, advance_states, decays, step_partitions
from sse_convert.modeling.compat import is_bare, versions
from sse_convert.modeling.initialise import NORM_EPS, NewProjection, PreciseProjection, precise_dtype
from sse_convert.modeling.layout import SequenceLayout
from sse_convert.modeling.token_fold import Folded, folds
from sse_convert.modeling.token_heads import Flat, Rotation, Separate, TokenHeads, new_projections


def takes_steps(layer: Any, x: Tensor, layout: SequenceLayout, state: Tensor) -> bool:
    """Whether `LayerStep` computes this: new tokens x [B, hidden], one for each row, on a CPU, without gradients; a
    state in one piece."""
    alone = layout.max_seqlen == 1 and layout.tokens is None and layout.real is None
    if not alone or x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    mixer = layer.mixer
    kept = state.is_contiguous() and state.dtype == precise_dtype(x) and not torch.is_autocast_enabled("cpu")
    return mixer.router == "hidden" and kept and mixer.num_partitions > 1 and layer.backend in ("auto", "recurrent")


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
        self._layer, self._dtypes = layer, dtypes
        self._heads = Folded(layer) if folds(layer, dtypes) else Separate(layer, dtypes)
        self._watched = [layer.sse_k_scale, *(p for part in self._heads.modules for p in part.parameters())]
        self._versions = versions(self._watched)
        self.floor = torch.tensor((layer.dims.value_dim * NORM_EPS) ** 0.5, dtype=dtypes[1])
        """what keeps the norm of a head from 0: `NORM_EPS` of a sum of squares"""
        self._shared = layer.mixer.num_partitions if layer.mixer.shared_partition else None
        self._normalizer = layer.mapping_options()["decay_normalizer"]

    def is_current(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
        """Whether it is of this layer with the weights that it has now."""
        same = self._layer is layer and self._dtypes == dtypes and self._heads.is_current()
        return same and versions(self._watched) == self._versions

    def __call__(
        self, x: Tensor, flat: Flat | None, rotation: Rotation, state: Tensor, window: Rotation = None
    ) -> tuple[Tensor, TokenHeads]:
        """Outputs [B, Hq, V], and what they were made of; the state is overwritten.

        Args:
            x: [B, hidden].
            flat: q, k and v that the layer's `project` makes of x; None to make them here.
            rotation: (cos, sin), each [1 or B, 1, rotated dims]; None for no rotation.
            state: [B, M, H, D, V].
            window: of the window branch, as `rotation`; None where `rotation` is for both, or there is no branch.
        """
        mixer, gate, dtype = self._layer.mixer, self._layer.mixer.gate, self._dtypes[1]
        made = self._heads(x, flat, rotation, window)
        used_BR, weight_BR = step_partitions(made.router, mixer.top_k, self._shared, renormalise=gate.renormalise)
        tokens = TokenInputs(
            used_BR=used_BR,
            weight_BR=weight_BR,
            q_BRQD=made.q,
            k_BRHD=made.k,
            v_BRHV=made.v.unsqueeze(1).to(dtype),
            decay_BRHD=state.new_ones(1, 1, 1, 1)
            if made.decay is None
            else decays(made.decay, self._normalizer, dtype),
            strength_BRH=None if made.strength is None else torch.sigmoid(made.strength),
        )
        o = advance_states(state, tokens, write_gate=gate.write, read_gate=gate.read)
        return o.to(made.v.dtype), made


def _is_plain(layer: Any) -> bool:
    """Whether a layer's new projections are no more than their weights, which are at hand."""
    parts = new_projections(layer).values()
    known = all(type(part) in (NewProjection, PreciseProjection) and is_bare(part) for part in parts)
    return known and all(p.device.type == "cpu" and not p.is_inference() for part in parts for p in part.parameters())
