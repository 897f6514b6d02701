"""FLOPs of training, and how long they take: GPU hours, scaled from what was measured of the nearest width and row."""

import dataclasses as dc
import functools
import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.surgery import budget
from sse_convert.surgery.budget import Geometry, Mixers

MEASURED = Path(__file__).parent / "measured_speed.json"
"""written by tools/measured_speed.py"""
WIDTH = 110
"""characters of a line that is told"""
SOURCE = "benchmarks/training"
"""where they were measured"""
LOSS_LIKE = {"layer_mse": "kl", "kl": "kl", "ce": "ce"}
"""loss of a stage -> loss whose measured speed stands for it"""
_TEACHER_PASS = {"layer_mse": 1, "kl": 1, "ce": 0}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """What was measured of one loss on one shape."""

    loss: str
    """kl or ce"""
    shape: str
    """recipe of the model whose shape it was"""
    hidden_size: int
    """its width"""
    seq_len: int
    """tokens of a row"""
    layers: int
    """that were measured"""
    all_layers: int
    """that the shape has"""
    experts: bool
    """it has a mixture of experts"""
    whole: bool
    """all weights were trained"""
    gpus: int
    gpu: str
    tokens_per_second: float
    """of all GPUs"""
    flops_per_token: float
    """counted as `training_flops` does, what was computed twice included"""
    commit: str

    @property
    def described(self) -> str:
        """For a person."""
        cut = "" if self.layers == self.all_layers else f" with {self.layers} of {self.all_layers} layers"
        said = f"{self.loss} {self.tokens_per_second:,.0f} of {self.shape}{cut} at {self.seq_len >> 10}K"
        said += "" if self.whole else ", converted layers alone"
        return f"{said}, {self.gpus} x {self.gpu}" if self.gpus > 1 else f"{said}, {self.gpu}"

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the whole training step, of one GPU."""
        return self.tokens_per_second * self.flops_per_token / self.gpus

    def hours(self, flops: float) -> float:
        """Hours of one GPU for so many FLOPs."""
        return flops / self.flops_per_second / 3600


@functools.cache
def measured_speeds() -> dict[str, list[MeasuredSpeed]]:
    """Loss (kl, ce) -> what was measured, by rising width and row."""
    data = _measured()
    return {loss: [MeasuredSpeed(loss=loss, **found) for found in data[loss]] for loss in ("kl", "ce")}


@functools.cache
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Hours of a run beside its choice of layers and its steps, as they were measured of SmolLM2-135M on one GPU."""

    compiling: float
    """in the first steps of stages"""
    calibrating: float
    evaluating: float
    """scaled by FLOPs, as the steps are"""
    all_else: float
    """starting, reading, converting and writing; a larger model takes longer"""

    @property
    def hours(self) -> float:
        """Of all."""
        return self.compiling + self.calibrating + self.evaluating + self.all_else


def beside_training(recipe: Recipe, geometry: Geometry, *, compiled: int) -> Beside:
    """What a run takes beside its steps, on GPUs.

    Args:
        recipe: what is calibrated and measured.
        geometry: the model's sizes.
        compiled: stages whose layers are compiled.
    """
    seconds = _measured()["beside"]
    first = seconds["first_step"] + (compiled - 1) * seconds["later_first_step"] if compiled else 0.0
    own = seconds["calibrating"] if recipe.calibrate.enabled else 0.0
    row = max(recipe.eval.lengths, default=1)
    near = nearest_speed("kl", geometry.dims.hidden, row, whole=True, experts=geometry.has_experts)
    return Beside(
        compiling=first / 3600,
        calibrating=own / 3600,
        evaluating=near.hours(evaluation_flops(recipe, geometry)),
        all_else=seconds["all_else"] / 3600,
    )


def evaluation_flops(recipe: Recipe, geometry: Geometry) -> float:
    """Of teacher and hybrid reading what `eval` asks for, the hybrid as if it were plain."""
    needle, tokens = recipe.eval.needle, recipe.eval.tokens
    read = [(tokens, length) for length in recipe.eval.lengths if tokens]
    read += [(needle.samples * length, length) for length in needle.lengths] if needle else []
    plain: Mixers = [None] * geometry.layers
    return 2 * sum(wanted * budget.forward_flops(geometry, plain, length) for wanted, length in read)


def nearest_speed(loss: str, hidden_size: int, seq_len: int, *, whole: bool, experts: bool) -> MeasuredSpeed:
    """What was measured of a loss on the shape whose width is nearest, by ratio, among those with experts or without.

    Of several, what trained as much of the model counts, and then the nearest rows.

    Args:
        loss: kl or ce.
        hidden_size: width of the model.
        seq_len: tokens of a row.
        whole: all weights are trained.
        experts: the model has a mixture of experts; where no such was measured of the loss, others count.
    """

    def distance(speed: MeasuredSpeed) -> tuple[bool, float, bool, float]:
        width, rows = math.log(speed.hidden_size / hidden_size), math.log(speed.seq_len / seq_len)
        return speed.experts != experts, abs(width), speed.whole != whole, abs(rows)

    return min(measured_speeds()[loss], key=distance)


def speed_of(stage: Stage, geometry: Geometry) -> MeasuredSpeed:
    """What stands for a stage of a model of these sizes."""
    return nearest_speed(
        LOSS_LIKE[stage.loss],
        geometry.dims.hidden,
        stage.seq_len,
        whole=stage.train == "all",
        experts=geometry.has_experts,
    )


def measured_line(speeds: Iterable[MeasuredSpeed]) -> str:
    """Where GPU hours come from, for a person, each measurement once; there must be one."""
    once = list(dict.fromkeys(speeds))
    text = (
        "GPU hours are estimated from tokens/s that were measured: "
        f"{'; '.join(speed.described for speed in once)} ({SOURCE}). "
        "The nearest of them is scaled by FLOPs; another GPU has another speed"
    )
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def gpu_hours(stage: Stage, geometry: Geometry, mixers: Mixers) -> float:
    """Hours of one GPU of the measured kind for all tokens of a stage, several GPUs losing nothing.

    Args:
        stage: loss, tokens, lengths, what is trained.
        geometry: the model's sizes.
        mixers: mixer of each layer.
    """
    flops = stage.tokens * training_flops(stage, geometry, mixers)
    return speed_of(stage, geometry).hours(flops)


def training_flops(stage: Stage, geometry: Geometry, mixers: Mixers) -> float:
    """FLOPs per training token of a stage; arguments as of `gpu_hours`.

    F is a forward pass: F for the teacher where the loss needs one, then for the student F, F for the gradients of its
    activations, and F for those of its weights (only the trained share of it), and F again with gradient checkpointing
    where the stage says so outright.
    `layer_mse` runs and trains the converted layers' attention alone.
    """
    length = stage.seq_len
    plain: Mixers = [None] * geometry.layers
    beside = _TEACHER_PASS[stage.loss] * budget.forward_flops(geometry, plain, length)
    attention = sum(
        2 * geometry.at(i).attention_parameters + budget.mixer_flops(geometry, i, mixer, length)
        for i, mixer in enumerate(mixers)
        if mixer is not None
    )
    student = attention if stage.loss == "layer_mse" else budget.forward_flops(geometry, mixers, length)
    weights = student if stage.train == "all" else attention
    return beside + student * (2 + (stage.gradient_checkpointing is True)) + weights
