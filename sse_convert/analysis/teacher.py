"""The teacher beside the student: how far each layer's output is off, and how far the teacher's heads look."""

import dataclasses as dc
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.calibration.attention_statistics import Collector
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.console import Bar
from sse_convert.data.sample_text import Text
from sse_convert.errors import CheckpointError
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.attention_dims import softmax_layers
from sse_convert.training.align import converted_arguments
from sse_convert.training.setup import converted_attention

ATTENTION_AT_ONCE = 2**27
"""elements of the largest attention matrix, all heads of one row"""


@dc.dataclass(slots=True)
class LayerOutputError:
    """Sums over tokens and channels of what a layer's attention adds to the residual stream."""

    error: float = 0.0
    """squared differences to the teacher"""
    student: float = 0.0
    """squares of the student"""
    teacher: float = 0.0
    """squares of the teacher"""
    product: float = 0.0
    """products of the two"""

    def add(self, student: Tensor, teacher: Tensor) -> None:
        """Add outputs of one shape."""
        student, teacher = student.double(), teacher.double()
        self.error += float((student - teacher).square().sum())
        self.student += float(student.square().sum())
        self.teacher += float(teacher.square().sum())
        self.product += float((student * teacher).sum())

    def result(self) -> dict[str, float]:
        """Error as a part of the teacher's power: 0 for equal outputs, 1 for no output at all; and the cosine."""
        lengths = math.sqrt(self.student * self.teacher)
        return {
            "relative": self.error / self.teacher if self.teacher else math.nan,
            "cosine": self.product / lengths if lengths else math.nan,
        }


def check_pair(teacher: Teacher, student: Teacher) -> None:
    """Refuse a teacher whose layers are not those of the student.

    Args:
        teacher: as it was opened.
        student: the converted model, seen as its source (`source_view`).

    Raises:
        CheckpointError: family, depth or attention sizes differ.
    """
    if _shape(teacher) != _shape(student):
        raise CheckpointError(
            f"{teacher.files.name} is a {_shape(teacher)}",
            expected=f"the model that was converted, a {_shape(student)}",
            fix="correct --teacher",
        )


def _shape(model: Teacher) -> str:
    d = model.dims
    heads = f"{d.query_heads} query and {d.kv_heads} key heads of {d.head_dim}"
    return f"{model.spec.model_type} of {model.num_layers} layers, width {d.hidden}, {heads}"


@torch.no_grad()
def output_errors(
    student: PreTrainedModel, teacher: PreTrainedModel, text: Text, *, rows: int, bar: Bar
) -> dict[int, dict[str, float]]:
    """Errors of converted layers that are given their teacher layer's inputs.

    Args:
        student: converted model.
        teacher: the model it was made from, on the same device.
        text: what both see.
        rows: of the text in one pass.
        bar: advanced by one per row.

    Returns:
        Index of each converted layer (SSE, GLA or sliding) -> `OutputError.result`.
    """
    spec = source_spec(student.config.model_type)
    errors = {index: LayerOutputError() for index in converted_attention(student)}
    extra: dict[str, Any] = {}
    handles = [
        teacher.get_submodule(spec.attention_path(index)).register_forward_hook(
            functools.partial(_compare, student.get_submodule(path), errors[index], extra), with_kwargs=True
        )
        for index, path in converted_attention(student).items()
    ]
    try:
        for batch, _ in text.batches(rows):
            positions = torch.arange(text.length, device=student.device).expand(len(batch), -1)
            extra.update(converted_arguments(student, positions))
            backbone_of(teacher)(input_ids=batch.to(teacher.device), use_cache=False)
            bar.update(len(batch))
    finally:
        for handle in handles:
            handle.remove()
    return {index: error.result() for index, error in errors.items()}


def _compare(
    attention: nn.Module,
    error: LayerOutputError,
    extra: dict[str, Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    error.add(attention(*args, **{**kwargs, **extra})[0], output[0])


def attention_distances(teacher: PreTrainedModel, text: Text, *, bar: Bar) -> tuple[dict[int, list[float]], int]:
    """How far back each head of the teacher looks, in tokens, weighted by its attention.

    The teacher is set to eager attention, which gives its weights. See `Collector` for what counts.

    Args:
        teacher: plain model.
        text: rows; only their beginnings are used where whole rows would make too large a matrix.
        bar: advanced by one per row.

    Returns:
        Index of each layer -> mean distance of its query heads; and the tokens used of each row.
    """
    config = decoder_config(teacher.config)
    length = min(text.length, math.isqrt(ATTENTION_AT_ONCE // config.num_attention_heads))
    collector = Collector(teacher, source_spec(teacher.config.model_type), softmax_layers(config))
    positions = torch.arange(length, device=teacher.device)[None]
    for row, _ in text.batches(1):
        collector.run({"input_ids": row[:, :length].to(teacher.device), "position_ids": positions})
        bar.update()
    return {i: statistics.mean_distance().tolist() for i, statistics in collector.statistics.items()}, length
