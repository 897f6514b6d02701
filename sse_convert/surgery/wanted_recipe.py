"""What a new recipe is asked for with, and what it is once it is made."""

import dataclasses as dc
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sse_convert.checkpoints.config_only import has_weights
from sse_convert.checkpoints.safetensors_io import TensorInfo
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES, file_pieces
from sse_convert.recipe import Recipe
from sse_convert.recipe.recommended import USUAL_SIZE, ModelSizes
from sse_convert.surgery.costs import Way
from sse_convert.surgery.plan_report import Plan
from sse_convert.surgery.recipe_text import WEB_TEXT, RecipeText
from sse_convert.surgery.recipe_time import Pace

READ_BYTES = 1 << 20
"""of each matrix whose weights are measured"""


@dc.dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one host."""

    gpus: int
    gib: int
    """memory of each"""


@dc.dataclass(frozen=True, slots=True)
class Cpu:
    """This machine, where it has no GPU."""

    memory: int
    """bytes"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked for beside the model."""

    model: str
    """hub id or folder"""
    name: str
    """of the recipe"""
    title: str
    """of the model"""
    command: str
    """how commands name the recipe"""
    text: RecipeText = WEB_TEXT
    """to train on, and to measure on"""
    license: str | None = None
    note: str = ""
    """a line of the header"""
    weight_size: float | None = None
    """root mean square of the weights of its output projections; None where they were not read"""
    hours: float | None = None
    """that choosing, training and measuring may take; None for the rule's tokens, and two on a CPU"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class NewRecipe:
    """A recipe as text, and what it is for."""

    text: str
    data: dict[str, Any]
    """the same as plain data"""
    recipe: Recipe
    way: Way | None
    """how to launch it on GPUs; None where it does not fit"""
    plan: Plan
    pace: Pace | None = None
    """of the CPU that it is for"""

    @property
    def fits(self) -> bool:
        """Whether it fits the machine."""
        return self.way is not None or self.pace is not None


def sizes_of(teacher: Teacher, weight_size: float | None = None) -> ModelSizes:
    """What the rule reads of a model.

    Args:
        teacher: the opened model.
        weight_size: root mean square of the weights of its output projections; None for the usual one.
    """
    softmax = set(teacher.softmax_layers)
    return ModelSizes(
        width=teacher.dims.hidden,
        weight_size=USUAL_SIZE if weight_size is None else weight_size,
        parameters=teacher.files.parameters,
        positions=teacher.text.max_position_embeddings,
        full=tuple(i in softmax and window is None for i, window in enumerate(teacher.windows)),
        heads=teacher.separable_heads,
    )


def read_weight_size(teacher: Teacher) -> float | None:
    """Root mean square of the weights of the output projections, of the first of each, the median of all layers; None
    where the weights are not in a folder, hold no floats, or have no size."""
    files, output = teacher.files, f"{teacher.spec.output}.weight"
    infos = [files.tensors[teacher.attention_tensor(layer, output)] for layer in teacher.softmax_layers]
    if files.remote or not all(TORCH_DTYPES[info.dtype].is_floating_point for info in infos) or not has_weights(files):
        return None
    squares = [_first(files.folder, info).float().square().mean().item() for info in infos]
    size = math.sqrt(statistics.median(squares)) if all(map(math.isfinite, squares)) else 0.0
    return size or None


def _first(folder: Path, info: TensorInfo) -> Tensor:
    """The first elements of a stored tensor."""
    pieces = file_pieces(folder / info.shard, info.start, min(info.nbytes, READ_BYTES))
    return torch.frombuffer(next(pieces), dtype=TORCH_DTYPES[info.dtype])
