"""From what a teacher's layer does to the values of new tensors: decay bias, output scale, router rows."""

import dataclasses as dc
import math

import torch
from torch import Tensor

from sse_convert.errors import CheckpointError
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.architectures import AttentionDims
from sse_convert.modeling.tensors import state_heads
from sse_convert.recipe import Recipe
from sse_convert.surgery.kmeans import spherical_kmeans
from sse_convert.surgery.statistics import LayerStatistics

HALF_LIFE = 1.0, 4096.0
"""tokens; bounds of a head's half-life"""
SPREAD = 4.0
"""the channels of a head lie between half-life / SPREAD and half-life * SPREAD, evenly in the logarithm"""
LOGIT_STD = 1.0
"""spread of the router's logits over tokens when its rows are centroids"""
MIN_SCALE = 1e-4
"""smallest output scale, so that a head that is silent on the calibration text can still learn"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedLayer:
    """What one layer was set to."""

    index: int
    half_life: tuple[float, float] | None
    """tokens, shortest and longest over the state heads; None where decay was left alone"""
    output_scale: tuple[float, float] | None
    """smallest and largest over the query heads; None where scales were left alone"""
    router: str
    """random (left alone), kmeans, or none"""


def calibrated_tensors(
    recipe: Recipe, layer: int, mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics
) -> tuple[dict[str, Tensor], CalibratedLayer]:
    """New values for one layer's tensors, by name below the attention module, float32.

    Args:
        recipe: `calibrate` and the seed are read.
        layer: its index.
        mixer: its settings.
        dims: attention sizes.
        statistics: what the teacher's layer did.
    """
    settings = recipe.calibrate
    values: dict[str, Tensor] = {}
    half_life_H = half_lives(statistics.mean_distance(), state_heads(dims, mixer))
    has_decay = settings.decay and mixer.decay != "none"
    if has_decay:
        names = ("sse_decay_up.bias", "sse_shared_decay_up.bias")
        bias = decay_bias(half_life_H, dims.head_dim if mixer.decay == "gla" else 1, mixer.decay_normalizer)
        values |= dict.fromkeys(names if mixer.decay_params == "separate" else names[:1], bias)
    scale_H = statistics.output_rms()
    if mixer.output_norm == "none":
        scale_H = scale_H / statistics.student_rms().clamp_min(MIN_SCALE)
    scale_H = scale_H.clamp_min(MIN_SCALE)
    if settings.output_scale:
        values["sse_out_scale"] = scale_H.float().repeat_interleave(dims.head_dim)
    router = "none" if mixer.num_partitions == 1 else "random"
    if router == "random" and settings.router == "kmeans":
        generator = torch.Generator().manual_seed(recipe.train.seed)
        values["sse_router.weight"] = router_rows(torch.cat(statistics.inputs), mixer.num_partitions, generator)
        router = "kmeans"
    summary = CalibratedLayer(
        index=layer,
        half_life=(float(half_life_H.min()), float(half_life_H.max())) if has_decay else None,
        output_scale=(float(scale_H.min()), float(scale_H.max())) if settings.output_scale else None,
        router=router,
    )
    return values, summary


def half_lives(distance_Q: Tensor, heads: int) -> Tensor:
    """Half-life [H] in tokens of each state head: the mean distance its query heads look, their geometric mean.

    Args:
        distance_Q: mean attention distance [Hq].
        heads: H, a divisor of Hq; query head h reads state h // (Hq // H).
    """
    bounded = distance_Q.double().clamp(*HALF_LIFE)
    return bounded.log().view(heads, -1).mean(1).exp()


def decay_bias(half_life_H: Tensor, channels: int, normalizer: float) -> Tensor:
    """Bias of the decay projection for given half-lives, spread over the channels of a head.

    With log decay = logsigmoid(b) / normalizer and half-life h, b = -log(expm1(y)) with y = log(2) * normalizer / h,
    written so that a large y does not overflow. Half-lives count tokens that reach a partition.

    Args:
        half_life_H: [H] tokens.
        channels: D, or 1 for one decay per head.
        normalizer: `decay_normalizer` of the mixer.

    Returns:
        float32 [H * channels].
    """
    exponent = torch.linspace(-1, 1, channels, dtype=torch.float64) if channels > 1 else torch.zeros(1).double()
    half_life_HD = half_life_H.double()[:, None] * SPREAD**exponent
    y = math.log(2) * normalizer / half_life_HD
    return -(y + torch.log(-torch.expm1(-y))).flatten().float()


def router_rows(inputs: Tensor, partitions: int, generator: torch.Generator) -> Tensor:
    """Router rows [N, hidden] from centroids of the layer's inputs [tokens, hidden].

    What all centroids share is removed (softmax does not see it), and the rows are scaled so that logits have a
    standard deviation of `LOGIT_STD` over tokens.

    Raises:
        CheckpointError: there are fewer tokens than partitions.
    """
    if len(inputs) < partitions:
        raise CheckpointError(
            f"{len(inputs)} calibration tokens for {partitions} router centroids",
            expected="more tokens than partitions",
            fix="raise calibrate.rows or calibrate.seq_len, or use router: random",
        )
    rows = spherical_kmeans(inputs, partitions, generator)
    rows = rows - rows.mean(0)
    return rows * (LOGIT_STD / (inputs @ rows.T).std().clamp_min(1e-6))
