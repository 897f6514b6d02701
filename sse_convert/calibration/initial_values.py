"""From what a teacher's layer does to the values of new tensors: decay bias and output scale."""

import math
from typing import Literal

import torch
from torch import Tensor

from sse_convert.calibration.attention_statistics import LayerStatistics
from sse_convert.mixers import DECAY_NORMALIZER, SSEMixer, SSESlidingMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.tensors import own_query_heads, state_heads

HALF_LIFE = 1.0, 4096.0
"""tokens; bounds of a head's half-life"""
SPREAD = 2.0
"""the channels of a head lie between half-life / SPREAD and half-life * SPREAD, evenly in the logarithm"""
MIN_SCALE = 1e-4
"""smallest output scale, so that a head that is silent on the calibration text can still learn"""


def branch_windows(mixers: dict[int, SSEMixer]) -> dict[int, tuple[int, int]]:
    """(window, sinks) of the layers that have a window beside SSE."""
    return {i: (mixer.window, mixer.sinks) for i, mixer in mixers.items() if isinstance(mixer, SSESlidingMixer)}


def decay_values(mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics) -> dict[str, Tensor]:
    """New values of one layer's decay bias, by name below the attention module, float32.

    Nothing where nothing is known of distances: no document of the rows is longer than the window.

    Args:
        mixer: settings of the layer.
        dims: attention sizes.
        statistics: what the teacher's layer did.
    """
    if not statistics.measured:
        return {}
    half_life_H = state_half_lives(mixer, dims, statistics)
    bias = half_life_bias(half_life_H, dims.head_dim if mixer.decay == "gla" else 1)
    names = ("sse_decay_up.bias", "sse_shared_decay_up.bias")
    return dict.fromkeys(names if mixer.decay_params == "separate" else names[:1], bias)


def output_scale(
    kind: Literal["fit", "size"], mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics
) -> dict[str, Tensor]:
    """New output scale of one layer, by name below the attention module, float32: one value per head.

    Each head's output y at scale one is scaled for what it is to give, t.

    t is the teacher's head output; beside a window, what the window misses of it. `fit` is least squares,
    <t, y> / <y, y>, with an error of 1 - c^2 at correlation c, no larger than without the head; `size` gives y the root
    mean square of t, with an error of 2 - 2c. Neither is below `MIN_SCALE`.

    Args:
        kind: how to choose.
        mixer: settings of the layer.
        dims: attention sizes.
        statistics: of the teacher's layer and of the new one.
    """
    if kind == "fit":
        smallest = torch.finfo(torch.float64).tiny
        scale_H = statistics.student_product_H / statistics.student_square_H.clamp_min(smallest)
    else:
        target_H = statistics.missed_rms() if isinstance(mixer, SSESlidingMixer) else statistics.output_rms()
        scale_H = target_H / statistics.student_rms().clamp_min(MIN_SCALE)
    own_H = scale_H[own_query_heads(dims, mixer)]
    return {"sse_out_scale": own_H.clamp_min(MIN_SCALE).float().repeat_interleave(dims.value_dim)}


def state_half_lives(mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics) -> Tensor:
    """Half-life [H] in tokens of each state head of a layer; arguments as of `decay_values`."""
    return half_lives(statistics.mean_distance()[own_query_heads(dims, mixer)], state_heads(dims, mixer))


def half_lives(distance_Q: Tensor, heads: int) -> Tensor:
    """Half-life [H] in tokens of each state head: the mean distance its query heads look, their geometric mean.

    Args:
        distance_Q: mean attention distance [Hq].
        heads: H, a divisor of Hq; query head h reads state h // (Hq // H).
    """
    bounded = distance_Q.double().clamp(*HALF_LIFE)
    return bounded.log().view(heads, -1).mean(1).exp()


def half_life_bias(half_life_H: Tensor, channels: int) -> Tensor:
    """Bias of the decay projection for given half-lives, spread over the channels of a head.

    With log decay = logsigmoid(b) / DECAY_NORMALIZER and half-life h, b = -log(expm1(y)), y = log(2) * normalizer / h,
    written so that a large y does not overflow. Half-lives count tokens that reach a partition.

    Args:
        half_life_H: [H] tokens.
        channels: D, or 1 for one decay per head.

    Returns:
        float32 [H * channels].
    """
    exponent = torch.linspace(-1, 1, channels, dtype=torch.float64) if channels > 1 else torch.zeros(1).double()
    half_life_HD = half_life_H.double()[:, None] * SPREAD**exponent
    y = math.log(2) * DECAY_NORMALIZER / half_life_HD
    return -(y + torch.log(-torch.expm1(-y))).flatten().float()
