"""FLOPs of training, and how long they take: GPU hours at the speed that was measured on one shape, scaled by FLOPs."""

import dataclasses as dc
import functools
import json
from pathlib import Path

from sse_convert.recipe.schema import Stage
from sse_convert.surgery import budget
from sse_convert.surgery.budget import Geometry, Mixers

MEASURED = Path(__file__).parent / "measured_speed.json"
"""written by tools/measured_speed.py from the benchmark that it names"""
LOSS_LIKE = {"layer_mse": "kl", "kl": "kl", "ce": "ce"}
"""loss of a stage -> loss whose measured speed stands for it"""
_TEACHER_PASS = {"layer_mse": 1, "kl": 1, "ce": 0}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """What was measured of one loss."""

    tokens_per_second: float
    flops_per_token: float
    """of the measured shape, counted as `training_flops` does"""
    shape: str
    """model whose shape it was"""
    gpu: str
    source: str
    """the benchmark's JSON"""
    commit: str

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the whole training step."""
        return self.tokens_per_second * self.flops_per_token


@functools.cache
def measured_speeds() -> dict[str, MeasuredSpeed]:
    """Loss (kl, ce) -> what was measured."""
    data = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {
        loss: MeasuredSpeed(
            tokens_per_second=found["tokens_per_second"],
            flops_per_token=found["flops_per_token"],
            shape=data["shape"],
            gpu=data["gpu"],
            source=data["source"],
            commit=found["commit"],
        )
        for loss, found in data["losses"].items()
    }


def measured_line() -> str:
    """Where GPU hours come from, for a person."""
    speeds = measured_speeds()
    rates = " and ".join(f"{speed.tokens_per_second:,.0f} ({loss})" for loss, speed in speeds.items())
    one = speeds["kl"]
    return (
        f"GPU hours are estimated from {rates} tokens/s measured with {one.shape} shapes on one {one.gpu}\n"
        f"({one.source}), scaled by FLOPs; another GPU has another speed"
    )


def gpu_hours(stage: Stage, geometry: Geometry, mixers: Mixers, teacher: Geometry | None = None) -> float:
    """Hours of one GPU of the measured kind for all tokens of a stage, several GPUs losing nothing.

    Args:
        stage: loss, tokens, lengths, what is trained.
        geometry: the model's sizes.
        mixers: mixer of each layer.
        teacher: sizes of another model that the stage learns from; None is the model itself.
    """
    return hours(stage.tokens * training_flops(stage, geometry, mixers, teacher), LOSS_LIKE[stage.loss])


def hours(flops: float, loss: str = "kl") -> float:
    """Hours of one GPU of the measured kind.

    Args:
        flops: of all that is done.
        loss: whose measured speed it has.
    """
    return flops / measured_speeds()[loss].flops_per_second / 3600


def training_flops(stage: Stage, geometry: Geometry, mixers: Mixers, teacher: Geometry | None = None) -> float:
    """FLOPs per training token of a stage; arguments as of `gpu_hours`.

    F is a forward pass: F for the teacher where the loss needs one, then for the student F, F for the gradients of its
    activations, and F for those of its weights (only the trained share of it), and F again with gradient checkpointing
    where the stage says so outright.
    `layer_mse` runs and trains the converted layers' attention alone.
    """
    length, other = stage.seq_len, teacher or geometry
    plain: Mixers = [None] * other.layers
    beside = _TEACHER_PASS[stage.loss] * budget.forward_flops(other, plain, length)
    attention = sum(
        2 * geometry.at(i).attention_parameters + budget.mixer_flops(geometry, i, mixer, length)
        for i, mixer in enumerate(mixers)
        if mixer is not None
    )
    student = attention if stage.loss == "layer_mse" else budget.forward_flops(geometry, mixers, length)
    weights = student if stage.train == "all" else attention
    return beside + student * (2 + (stage.gradient_checkpointing is True)) + weights
