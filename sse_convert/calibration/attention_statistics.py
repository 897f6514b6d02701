"""What a teacher's attention layers do on a few rows of text: how far heads look, how large their outputs are.

Shape letters: B rows, T tokens, N = B * T, Hq query heads, D head size.
"""

import dataclasses as dc
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.mixers import WindowMixer
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import document_starts, sequence_layout
from sse_convert.modeling.projections import projections, value_heads
from sse_convert.modeling.tensors import own_query_heads
from sse_convert.modeling.window.masks import packed_arguments
from sse_convert.modeling.window.sliding import training_mask


@dc.dataclass(kw_only=True, slots=True)
class LayerStatistics:
    """Sums over the tokens seen so far, float64 on the CPU."""

    distance_H: Tensor
    """distance in tokens weighted by attention, summed over queries"""
    weight_H: Tensor
    """the attention behind it"""
    square_H: Tensor
    """squared outputs of the teacher's heads, mean over channels, summed over tokens"""
    missed_square_H: Tensor
    """the same for what a window misses of them, in layers that have a window beside the new branch"""
    student_square_H: Tensor
    """the same for the new layer's heads at scale one, where it was run; 0 of heads that it leaves softmax"""
    student_product_H: Tensor
    """those heads times what they are to give: the teacher's, or what the window misses of them; summed likewise"""
    tokens: int = 0

    @property
    def measured(self) -> bool:
        """Whether attention went anywhere that counts: in layers with a window, beyond what the window sees."""
        return bool(self.weight_H.any())

    def mean_distance(self) -> Tensor:
        """Mean distance [Hq] in tokens."""
        return self.distance_H / self.weight_H.clamp_min(torch.finfo(torch.float64).tiny)

    def output_rms(self) -> Tensor:
        """Root mean square of each teacher head's output before the output projection, [Hq]."""
        return (self.square_H / max(self.tokens, 1)).sqrt()

    def missed_rms(self) -> Tensor:
        """The same for what the layer's window misses, [Hq]."""
        return (self.missed_square_H / max(self.tokens, 1)).sqrt()

    def student_rms(self) -> Tensor:
        """The same for the new layer's heads at scale one, [Hq]."""
        return (self.student_square_H / max(self.tokens, 1)).sqrt()


class Collector:
    """Runs a teacher and sums what chosen layers do.

    Distances leave out what goes to the first token of a document: as an attention sink it takes much of the weight and
    says nothing about how far a head looks. In layers with a window they also leave out what the window sees, since the
    new branch is for the rest; and what the window misses is measured, the teacher's heads minus those of attention to
    what it sees alone.

    Args:
        model: causal language model of the family `spec`. It is set to eager attention, which returns its weights.
        spec: the family.
        layers: layers to watch.
        windows: (window, sinks) of those layers that have a window beside the new branch.
        students: new layers with output scales of one, built on the teacher's modules, to run on the same inputs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ArchSpec,
        layers: list[int],
        *,
        windows: dict[int, tuple[int, int]] | None = None,
        students: dict[int, SSEAttention] | None = None,
    ) -> None:
        heads = attention_dims(model.config).query_heads
        self.model, self.spec, self.students = model, spec, students or {}
        self.windows = windows or {}
        self.dims = {layer: attention_dims(model.config, layer) for layer in layers}
        self._values: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}
        self.statistics = {
            layer: LayerStatistics(
                distance_H=torch.zeros(heads, dtype=torch.float64),
                weight_H=torch.zeros(heads, dtype=torch.float64),
                square_H=torch.zeros(heads, dtype=torch.float64),
                missed_square_H=torch.zeros(heads, dtype=torch.float64),
                student_square_H=torch.zeros(heads, dtype=torch.float64),
                student_product_H=torch.zeros(heads, dtype=torch.float64),
            )
            for layer in layers
        }
        self._positions = torch.zeros(1, 1)
        model.set_attn_implementation("eager")

    @torch.no_grad()
    def run(self, batch: dict[str, Tensor]) -> None:
        """Add one batch.

        Args:
            batch: `input_ids` and `position_ids` [B, T]; positions restart at each packed document.
        """
        self._positions = batch["position_ids"]
        with self._hooks():
            more = packed_arguments(self.model, batch["position_ids"])
            backbone_of(self.model)(**batch, use_cache=False, **more)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        for layer, statistics in self.statistics.items():
            attention = self.model.get_submodule(self.spec.attention_path(layer))
            inputs = functools.partial(self._inputs, layer)
            handles += [
                attention.register_forward_pre_hook(inputs, with_kwargs=True),
                attention.register_forward_hook(functools.partial(self._weights, layer, statistics)),
                getattr(attention, self.spec.output).register_forward_pre_hook(
                    functools.partial(self._outputs, layer, statistics)
                ),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _weights(
        self, layer: int, statistics: LayerStatistics, module: Any, args: Any, outputs: tuple[Any, ...]
    ) -> None:
        weights_BHTT = outputs[1].float()
        position_BT = self._positions.to(weights_BHTT.device).double()
        if layer in self.windows:
            seen_BHTT = weights_BHTT * self._seen(layer, weights_BHTT)
            sunk_BHT1 = 1 - weights_BHTT.sum(3, keepdim=True) if self.spec.softmax_parameters else 0.0
            missed_NHD = _missed(
                weights_BHTT, seen_BHTT, sunk_BHT1, self._values.pop(layer), self.dims[layer].value_dim
            )
            statistics.missed_square_H += _sums(missed_NHD, missed_NHD)
            self._compare(layer, statistics, missed_NHD)
            weights_BHTT = weights_BHTT - seen_BHTT
        weights_BHTT = weights_BHTT * (position_BT != 0)[:, None, None]
        by_query, by_key = weights_BHTT.sum(3).double(), weights_BHTT.sum(2).double()
        distance_H = ((by_query - by_key) * position_BT[:, None]).sum((0, 2))
        statistics.distance_H += distance_H.cpu()
        statistics.weight_H += by_query.sum((0, 2)).cpu()

    def _seen(self, layer: int, like_BHTT: Tensor) -> Tensor:
        """bool [B, 1, T, T], what a layer's window sees."""
        shape = like_BHTT.shape[0], like_BHTT.shape[2]
        starts = document_starts(self._positions, shape[0])
        return training_mask(None, starts, shape, *self.windows[layer], like_BHTT.device)

    def _outputs(self, layer: int, statistics: LayerStatistics, module: Any, args: tuple[Tensor, ...]) -> None:
        heads_NHD = args[0].reshape(-1, len(statistics.square_H), self.dims[layer].value_dim)
        statistics.square_H += _sums(heads_NHD, heads_NHD)
        statistics.tokens += len(heads_NHD)
        if layer not in self.windows:
            self._compare(layer, statistics, heads_NHD)

    def _compare(self, layer: int, statistics: LayerStatistics, target_NHD: Tensor) -> None:
        """Add the new layer's heads, and their products with what they are to give."""
        if layer not in self.students:
            return
        student = self.students[layer]
        own = own_query_heads(student.source_dims, student.mixer)
        heads_NHD = self._student(student, self._given.pop(layer))
        statistics.student_square_H[own] += _sums(heads_NHD, heads_NHD)
        statistics.student_product_H[own] += _sums(heads_NHD, target_NHD[:, own])

    def _inputs(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x_BTC = args[0] if args else kwargs["hidden_states"]
        if layer in self.windows:
            dims = self.dims[layer]
            spec = self.spec.of(self.model.config, own_values=dims.own_values)
            self._values[layer] = value_heads(module, spec, dims, projections(module, spec, dims, x_BTC)[2]).flatten(2)
        if layer in self.students:
            self._given[layer] = x_BTC

    def _student(self, student: SSEAttention, x_BTC: Tensor) -> Tensor:
        batch, length = x_BTC.shape[:2]
        starts = document_starts(self._positions, batch)
        layout = sequence_layout((batch, length), x_BTC.device, starts=starts)
        inputs = student.operator_inputs(layout.pack(x_BTC))
        o_NHD = sse_attention(**inputs, cu_seqlens=layout.cu_seqlens)[0]
        heads = student.scaled(o_NHD, torch.float32)
        beside = isinstance(student.mixer, WindowMixer)  # where the source's own gate comes after both branches
        return (heads if beside else student.gated(heads, layout.pack(x_BTC))).view(o_NHD.shape)


def _sums(one_NHD: Tensor, other_NHD: Tensor) -> Tensor:
    """Products, mean over channels, summed over tokens: float64 [Hq] on the CPU."""
    return (one_NHD.double() * other_NHD.double()).mean(-1).sum(0).cpu()


def _missed(
    weights_BHTT: Tensor, seen_BHTT: Tensor, sunk_BHT1: Tensor | float, values_BTC: Tensor, value_dim: int
) -> Tensor:
    """What a window misses of the heads W V, [N, Hq, D].

    A softmax over fewer keys is the softmax over all of them, restricted and renormalised, together with what a learned
    sink takes of it.
    """
    batch, length = values_BTC.shape[:2]
    values_BHTD = values_BTC.float().view(batch, length, -1, value_dim).transpose(1, 2)
    values_BHTD = values_BHTD.repeat_interleave(weights_BHTT.shape[1] // values_BHTD.shape[1], 1)
    total_BHT1 = (seen_BHTT.sum(3, keepdim=True) + sunk_BHT1).clamp_min(torch.finfo(torch.float32).tiny)
    missed_BHTD = (weights_BHTT - seen_BHTT / total_BHT1) @ values_BHTD
    return missed_BHTD.transpose(1, 2).flatten(0, 1)
