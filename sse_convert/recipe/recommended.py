"""The best known recipe for a model of any size: a measured one, and the rule that scales it.

    what stays      a tenth of the heads, where layers have three or more key-value heads, a quarter where they have
                    two, otherwise a quarter of the layers; chosen before training (`ModelSizes.measured`)
    rates           those of the measured recipe: beside whole layers times its width over the model's, beside heads by
                    the size of the weights (`size_factors`); in smaller steps times the root of the step over the
                    measured one
    tokens          as many per parameter as the measured recipe had, or as its rule says, at most 600M and 200M
    a step's tokens those of the measured recipe, times the square root of how many times its tokens are trained on, as
                    a power of two; eight rows at least, so that eight GPUs can share a step
    rows            of the second stage as long as the model's context, at most 32K; of the first a quarter, at most 4K
    window          beside layers the measured one, beside heads a 64th of the second stage's rows where that is more;
                    at most an eighth of these rows: SSE learns what lies beyond it

Packaged recipes of hub models and `sse-convert recipes new` both come from here.
"""

import dataclasses as dc
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from sse_convert.mixers import FULL, SSESlidingMixer, changed_settings
from sse_convert.recipe.loader import load_recipe
from sse_convert.recipe.schema import Calibrate, LearningRates, Needles, Recipe, Stage

MEASURED_SIZE, USUAL_SIZE = 0.17, 0.02
"""root mean square of the weights of output projections, the median of all layers: of SmolLM2-135M-Instruct, beside
whose heads rates were measured, and of most models, where a model's own are not read"""
MOST_TOKENS = (600_000_000, 200_000_000)
LONGEST_ROW = 32768
SHORT_ROW = 4096
LEAST_ROWS = 8
"""of a step"""
WINDOWS = 8
"""that the second stage's rows hold at least, so that those of the first hold two"""
WINDOWS_BESIDE_HEADS = 64
"""that they hold at most, as of the measured recipe: longer windows cost little beside heads that grow with the row"""
MIXER = "sse+sliding"
STATE_HEADS: Literal["kv"] = "kv"
"""beside whole layers; that measured recipe has a state for each query head, which was level in one layer and takes
more memory"""
NEEDLE_ROW = 512
"""tokens of a row, below which nothing is planted"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A packaged recipe whose parts were measured, and what the rule takes beside it."""

    name: str
    """of the recipe"""
    width: int
    """hidden size of its model"""
    per_parameter: tuple[float, float]
    """tokens of the two stages"""
    select: dict[str, str]
    """`layers.select` of other models"""

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""
        return _packaged(self.name)

    @property
    def by_heads(self) -> bool:
        """Whether single heads are kept."""
        return self.select.get("by") == "heads"


@functools.cache
def _packaged(name: str) -> Recipe:
    return load_recipe(name)


LAYERS = Measured(name="teacher-qwen3-32m", width=512, per_parameter=(3, 1), select={"keep": "25%"})
"""whole layers"""
HEADS = Measured(
    name="smollm2-135m-heads", width=576, per_parameter=(0.104, 0.0446), select={"keep": "10%", "by": "heads"}
)
"""single heads, where layers have three or more"""
HEADS_OF_TWO = dc.replace(HEADS, select={"keep": "25%", "by": "heads"})
"""the same where layers have two, of which fewer can be spared (page *A real model*)"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What the rule reads of a model."""

    width: int
    """hidden size"""
    weight_size: float
    """root mean square of the weights of its output projections, the median of all layers"""
    parameters: int
    positions: int
    """longest context"""
    full: tuple[bool, ...]
    """per layer, whether it has full softmax attention"""
    heads: tuple[int, ...]
    """per layer, key-value heads of which some can be kept; 0 where none can"""

    @property
    def measured(self) -> Measured:
        """What stands for the model: heads where every layer with full attention has several to choose from."""
        fewest = min((heads for heads, full in zip(self.heads, self.full, strict=True) if full), default=0)
        return LAYERS if fewest < 2 else HEADS_OF_TWO if fewest == 2 else HEADS


def size_factors(sizes: ModelSizes) -> dict[str, float]:
    """What the measured rates of each group are multiplied by.

    AdamW moves what a matrix gives by its rate times the width: beside whole layers rates fall as width rises. Muon
    moves a matrix by its rate, whatever its size: beside heads the rates of the teacher's weights fall with their
    size, and those of what the teacher does not have with the root of that and with width. None of these rises.
    """
    by_width = sizes.measured.width / sizes.width
    if not sizes.measured.by_heads:
        return dict.fromkeys(("mixers", "new", "rest"), by_width)
    by_size = min(1.0, sizes.weight_size / MEASURED_SIZE)
    return {"mixers": by_size, "new": math.sqrt(by_size) * min(1.0, by_width), "rest": by_size}


def scaled_rates(sizes: ModelSizes, stage: Stage, step: int | None = None, *, whole: bool) -> dict[str, float]:
    """Learning rates of a measured stage for another model, with two digits. In smaller steps, whose gradients are
    noisier, they fall as the root of the step's tokens.

    Args:
        sizes: of the model.
        stage: of the measured recipe.
        step: tokens of an optimizer step; None for the measured one.
        whole: all weights are trained.
    """
    assert isinstance(stage.lr, LearningRates)
    noise, factors = math.sqrt(min(1.0, (step or stage.batch_tokens) / stage.batch_tokens)), size_factors(sizes)
    rates = {group: rate for group, rate in dc.asdict(stage.lr).items() if rate is not None}
    return {
        group: _rounded(rate * factors[group] * noise, 2) for group, rate in rates.items() if whole or group != "rest"
    }


def budgets(sizes: ModelSizes) -> tuple[int, int]:
    """Tokens of the two stages, with two digits."""
    wanted = zip(sizes.measured.per_parameter, MOST_TOKENS, strict=True)
    first, second = (int(_rounded(min(most, each * sizes.parameters), 2)) for each, most in wanted)
    return first, second


def step_tokens(stage: Stage, tokens: int, seq_len: int, least: int = LEAST_ROWS) -> int:
    """Tokens of an optimizer step.

    Args:
        stage: of the measured recipe.
        tokens: that are trained on.
        seq_len: tokens of a row.
        least: rows of a step.
    """
    wanted = stage.batch_tokens * math.sqrt(tokens / stage.tokens)
    return max(1 << round(math.log2(max(1.0, wanted))), least * seq_len)


def row_lengths(positions: int, longest: int = LONGEST_ROW) -> tuple[int, int]:
    """Tokens per row of the two stages: powers of two.

    Args:
        positions: of the model.
        longest: that the machine holds.
    """
    second = 1 << int(math.log2(min(positions, longest, LONGEST_ROW)))
    return max(1, min(SHORT_ROW, second // 4)), second


def recommended_stages(
    sizes: ModelSizes, longest: int = LONGEST_ROW, share: float = 1.0, least: int = LEAST_ROWS, *, whole: bool = False
) -> list[dict[str, Any]]:
    """The training stages, as a recipe writes them.

    Args:
        sizes: of the model.
        longest: tokens of a row that the machine holds.
        share: of the rule's tokens, for which there is text and time.
        least: rows of a step.
        whole: train all weights, where the measured recipe does; else converted layers alone.
    """
    measured = sizes.measured
    wanted = [_rounded(share * tokens, 2) for tokens in budgets(sizes)]
    planned = zip(measured.recipe.stages, map(int, wanted), row_lengths(sizes.positions, longest), strict=True)
    return [
        {
            "name": stage.name,
            "loss": stage.loss,
            "tokens": max(tokens, step),
            "seq_len": seq_len,
            **({} if whole else {"train": "mixers"}),
            "lr": scaled_rates(sizes, stage, step, whole=whole),
            "batch_tokens": step,
            **({"optimizer": stage.optimizer} if stage.optimizer != "adamw" else {}),
            "warmup": stage.warmup,
            "min_lr": stage.min_lr,
        }
        for stage, tokens, seq_len in planned
        for step in [step_tokens(stage, tokens, seq_len, least)]
    ]


def may_train_all(sizes: ModelSizes) -> bool:
    """Whether the measured recipe trains all weights."""
    return any(stage.train == "all" for stage in sizes.measured.recipe.stages)


def recommended_layers(full: Sequence[bool], measured: Measured = LAYERS) -> dict[str, Any]:
    """`layers` of a recipe: layers without full attention stay as they are.

    Args:
        full: per layer, whether it has full softmax attention.
        measured: what is kept.
    """
    unit = [MIXER if is_full else FULL for is_full in full]
    period = next(n for n in range(1, len(unit) + 1) if unit == [unit[i % n] for i in range(len(unit))])
    return {"pattern": unit[:period], "select": measured.select}


def recommended_mixer(positions: int = LONGEST_ROW, measured: Measured = LAYERS) -> dict[str, Any]:
    """Settings of what other layers, or other heads, become, where they are not the built-in mixer's.

    Args:
        positions: of the model, at most as many as a row of training has.
        measured: what is kept.
    """
    mixer = measured.recipe.known_mixers[MIXER]
    assert isinstance(mixer, SSESlidingMixer)
    row = row_lengths(positions)[1]
    window = max(mixer.window, row // WINDOWS_BESIDE_HEADS) if measured.by_heads else mixer.window
    window = min(window, max(1, row // WINDOWS))
    mixer = dc.replace(mixer, window=window, state_heads=mixer.state_heads if measured.by_heads else STATE_HEADS)
    return changed_settings(mixer)


def recommended_calibration(sizes: ModelSizes, longest: int = LONGEST_ROW) -> dict[str, Any]:
    """`calibrate` of a recipe, with rows no longer than the machine holds.

    Args:
        sizes: of the model.
        longest: tokens of a row that the machine holds.
    """
    own = sizes.measured.recipe.calibrate
    rows = min(own.seq_len, sizes.positions, longest)
    return _told(dc.replace(own, seq_len=rows), Calibrate(rows=0, seq_len=0))


def recommended_needles(sizes: ModelSizes, shortest: int) -> dict[str, Any]:
    """`data.needles` of a recipe, at most as dense as they were measured; nothing where nothing is planted.

    Args:
        sizes: of the model.
        shortest: tokens of its shortest row of training.
    """
    measured = sizes.measured.recipe
    needles = dc.replace(measured.data.needles, words=None)
    a_needle = min(stage.seq_len for stage in measured.stages) // max(needles.keys)
    needles = dc.replace(needles, keys=sorted({min(count, max(1, shortest // a_needle)) for count in needles.keys}))
    return _told(needles, Needles()) if needles.share and shortest >= NEEDLE_ROW else {}


def _told(settings: Any, defaults: Any) -> dict[str, Any]:
    """Those that differ from others."""
    others = dc.asdict(defaults)
    return {name: value for name, value in dc.asdict(settings).items() if value != others[name]}


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")
