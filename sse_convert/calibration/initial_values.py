"""From what a teacher's layer does to the values of new tensors: decay bias, key and output scale, router rows."""

import math
from typing import Literal

import torch
from torch import Tensor

from sse_convert.calibration.attention_statistics import LayerStatistics
from sse_convert.errors import CheckpointError
from sse_convert.mixers import SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import AttentionDims
from sse_convert.modeling.tensors import state_heads
from sse_convert.recipe import Recipe
from sse_convert.surgery.kmeans import spherical_kmeans

HALF_LIFE = 1.0, 4096.0
"""tokens; bounds of a head's half-life"""
SPREAD = 2.0
"""the channels of a head lie between half-life / SPREAD and half-life * SPREAD, evenly in the logarithm"""
LOGIT_STD = 1.0
"""spread of the router's logits over tokens when its rows are centroids"""
KEY_SCALES = (1, 1 / 2, 2, 1 / 4, 4, 1 / 8, 8, 1 / 16, 16)
"""what `key_scale: fit` chooses from; of equals the first is taken, so a head without a best one keeps 1"""
MIN_SCALE = 1e-4
"""smallest output scale, so that a head that is silent on the calibration text can still learn"""


def branch_windows(mixers: dict[int, SSEMixer]) -> dict[int, tuple[int, int]]:
    """(window, sinks) of the layers that have a window beside SSE."""
    return {i: (mixer.window, mixer.sinks) for i, mixer in mixers.items() if isinstance(mixer, SSESlidingMixer)}


def decay_and_router(
    recipe: Recipe, mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics
) -> dict[str, Tensor]:
    """New values of one layer's decay bias and router rows, by name below the attention module, float32.

    The decay is left alone where nothing is known of distances: no document of the rows is longer than the window.

    Args:
        recipe: `calibrate` and the seed are read.
        mixer: settings of the layer.
        dims: attention sizes.
        statistics: what the teacher's layer did.
    """
    values: dict[str, Tensor] = {}
    if recipe.calibrate.decay and mixer.decay != "none" and statistics.measured:
        half_life_H = half_lives(statistics.mean_distance(), state_heads(dims, mixer))
        bias = half_life_bias(half_life_H, dims.head_dim if mixer.decay == "gla" else 1, mixer.decay_normalizer)
        names = ("sse_decay_up.bias", "sse_shared_decay_up.bias")
        values |= dict.fromkeys(names if mixer.decay_params == "separate" else names[:1], bias)
    if recipe.calibrate.router == "kmeans" and mixer.num_partitions > 1:
        generator = torch.Generator().manual_seed(recipe.train.seed)
        values["sse_router.weight"] = router_rows(torch.cat(statistics.inputs), mixer.num_partitions, generator)
    return values


def key_scales(recipe: Recipe, mixer: SSEMixer) -> tuple[float, ...]:
    """The key scales that a layer is to try; none where they are left alone or its feature map cancels them."""
    return KEY_SCALES if recipe.calibrate.fits_keys(mixer.k_feature_map) else ()


def scales(recipe: Recipe, mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics) -> dict[str, Tensor]:
    """New values of one layer's key scale and output scale, by name below the attention module, float32.

    Args:
        recipe: `calibrate` is read.
        mixer: settings of the layer.
        dims: attention sizes.
        statistics: of the teacher's layer and of the new one, which tried `key_scales`.
    """
    values: dict[str, Tensor] = {}
    row_H = best_key_scale(statistics, state_heads(dims, mixer))
    if tried := key_scales(recipe, mixer):
        values["sse_k_scale"] = torch.tensor(tried)[row_H]
    if recipe.calibrate.output_scale != "none":
        row_Q = row_H.repeat_interleave(dims.query_heads // len(row_H))
        scale_SQ = output_scale(recipe.calibrate.output_scale, mixer, statistics)
        values["sse_out_scale"] = scale_SQ.gather(0, row_Q[None])[0].repeat_interleave(dims.head_dim)
    return values


def best_key_scale(statistics: LayerStatistics, heads: int) -> Tensor:
    """Which of the key scales tried each state head takes, int64 [H]: that with the least error of its query heads.

    At its best output scale, if not negative, a head y leaves |t|^2 - max(<t, y>, 0)^2 / |y|^2 of what it is to give,
    t: the error that alignment starts from. It counts attention weights by the values they fetch, with the layer's own
    decays, partitions, rotation and norm, and has no need of the weights themselves.

    Args:
        statistics: of the teacher's layer and of the new one.
        heads: H, a divisor of Hq; query head h reads state h // (Hq // H).
    """
    smallest = torch.finfo(torch.float64).tiny
    given_SQ = statistics.student_product_SH.clamp_min(0) ** 2 / statistics.student_square_SH.clamp_min(smallest)
    return given_SQ.view(len(given_SQ), heads, -1).sum(2).argmax(0)


def output_scale(kind: Literal["fit", "size"], mixer: SSEMixer, statistics: LayerStatistics) -> Tensor:
    """Scale [S, Hq] of each head's output y at scale one, for what it is to give, t, by key scale tried.

    t is the teacher's head output; beside a window, what the window misses of it. `fit` is least squares,
    <t, y> / <y, y>, with an error of 1 - c^2 at correlation c, no larger than without the head; `size` gives y the root
    mean square of t, with an error of 2 - 2c. Neither is below `MIN_SCALE`.

    Args:
        kind: how to choose.
        mixer: settings of the layer.
        statistics: of the teacher's layer and of the new one.
    """
    if kind == "fit":
        smallest = torch.finfo(torch.float64).tiny
        scale_SH = statistics.student_product_SH / statistics.student_square_SH.clamp_min(smallest)
    else:
        target_H = statistics.missed_rms() if isinstance(mixer, SSESlidingMixer) else statistics.output_rms()
        scale_SH = target_H / statistics.student_rms().clamp_min(MIN_SCALE)
    return scale_SH.clamp_min(MIN_SCALE).float()


def half_lives(distance_Q: Tensor, heads: int) -> Tensor:
    """Half-life [H] in tokens of each state head: the mean distance its query heads look, their geometric mean.

    Args:
        distance_Q: mean attention distance [Hq].
        heads: H, a divisor of Hq; query head h reads state h // (Hq // H).
    """
    bounded = distance_Q.double().clamp(*HALF_LIFE)
    return bounded.log().view(heads, -1).mean(1).exp()


def half_life_bias(half_life_H: Tensor, channels: int, normalizer: float) -> Tensor:
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
