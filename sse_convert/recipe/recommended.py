"""The best known recipe, for a model of any size: the measured one of the 32M teacher, and the rule that scales it.

    rates           those of the measured recipe, times its width over the model's (`RATE_POWER`)
    tokens          3 per parameter for the first stage and 1 for the second, at most 600M and 200M
    a step's tokens those of the measured recipe, times the square root of how many times its tokens are trained on, as
                    a power of two; eight rows at least, so that eight GPUs can share a step
    rows            of the second stage as long as the model's context, at most 32K; of the first a quarter, at most 4K
    window          the measured one, at most an eighth of the second stage's rows: SSE learns what lies beyond it
    layers          a quarter of those with full attention stay softmax, chosen before training; the others are trained
                    alone

Packaged recipes of hub models and `sse-convert recipes new` both come from here.
"""

import dataclasses as dc
import math
from collections.abc import Sequence
from typing import Any, Literal

from sse_convert.mixers import FULL, SSESlidingMixer, changed_settings
from sse_convert.recipe.loader import load_recipe
from sse_convert.recipe.schema import LearningRates, Recipe, Stage

MEASURED = "teacher-qwen3-32m"
"""the packaged recipe whose parts were measured"""
MEASURED_WIDTH = 512
"""hidden size of its model"""
RATE_POWER = 1.0
"""of width, by which rates fall: a step of Adam moves what a matrix gives by its rate times the width"""
KEEP = "25%"
TOKENS_PER_PARAMETER = (3, 1)
MOST_TOKENS = (600_000_000, 200_000_000)
LONGEST_ROW = 32768
SHORT_ROW = 4096
LEAST_ROWS = 8
"""of a step"""
WINDOWS = 8
"""that the second stage's rows hold at least, so that those of the first hold two"""
MIXER = "sse+sliding"
STATE_HEADS: Literal["kv"] = "kv"
"""the measured recipe has a state for each query head, which was level in one layer and takes more memory"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What the rule reads of a model."""

    width: int
    """hidden size"""
    parameters: int
    positions: int
    """longest context"""
    full: tuple[bool, ...]
    """per layer, whether it has full softmax attention"""


def measured() -> Recipe:
    """The recipe that everything is taken from."""
    return load_recipe(MEASURED)


def scaled_rates(stage: Stage, width: int) -> dict[str, float]:
    """Learning rates of a measured stage at another width, with two digits.

    Args:
        stage: of the measured recipe.
        width: hidden size of the model.
    """
    assert isinstance(stage.lr, LearningRates)
    factor = (MEASURED_WIDTH / width) ** RATE_POWER
    return {group: _rounded(rate * factor, 2) for group, rate in dc.asdict(stage.lr).items() if rate is not None}


def budgets(parameters: int) -> tuple[int, int]:
    """Tokens of the two stages, with two digits."""
    wanted = zip(TOKENS_PER_PARAMETER, MOST_TOKENS, strict=True)
    first, second = (int(_rounded(min(most, each * parameters), 2)) for each, most in wanted)
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
    return max(1 << round(math.log2(wanted)), least * seq_len)


def row_lengths(positions: int, longest: int = LONGEST_ROW) -> tuple[int, int]:
    """Tokens per row of the two stages: powers of two.

    Args:
        positions: of the model.
        longest: that the machine holds.
    """
    second = 1 << int(math.log2(min(positions, longest, LONGEST_ROW)))
    return max(1, min(SHORT_ROW, second // 4)), second


def recommended_stages(
    sizes: ModelSizes, longest: int = LONGEST_ROW, share: float = 1.0, least: int = LEAST_ROWS
) -> list[dict[str, Any]]:
    """The training stages, as a recipe writes them.

    Args:
        sizes: of the model.
        longest: tokens of a row that the machine holds.
        share: of the rule's tokens, for which there is text and time.
        least: rows of a step.
    """
    stages = measured().stages
    wanted = [_rounded(share * tokens, 2) for tokens in budgets(sizes.parameters)]
    planned = zip(stages, map(int, wanted), row_lengths(sizes.positions, longest), strict=True)
    return [
        {
            "name": stage.name,
            "loss": stage.loss,
            "tokens": max(tokens, step_tokens(stage, tokens, seq_len, least)),
            "seq_len": seq_len,
            "train": stage.train,
            "lr": scaled_rates(stage, sizes.width),
            "batch_tokens": step_tokens(stage, tokens, seq_len, least),
            **({"optimizer": stage.optimizer} if stage.optimizer != "adamw" else {}),
            "warmup": stage.warmup,
            "min_lr": stage.min_lr,
        }
        for stage, tokens, seq_len in planned
    ]


def recommended_layers(full: Sequence[bool]) -> dict[str, Any]:
    """`layers` of a recipe: layers without full attention stay as they are.

    Args:
        full: per layer, whether it has full softmax attention.
    """
    unit = [MIXER if is_full else FULL for is_full in full]
    period = next(n for n in range(1, len(unit) + 1) if unit == [unit[i % n] for i in range(len(unit))])
    return {"pattern": unit[:period], "select": {"keep": KEEP}}


def recommended_mixer(positions: int = LONGEST_ROW) -> dict[str, Any]:
    """Settings of what other layers become.

    Args:
        positions: of the model.
    """
    mixer = measured().mixers[MIXER]
    assert isinstance(mixer, SSESlidingMixer)
    window = min(mixer.window, max(1, row_lengths(positions)[1] // WINDOWS))
    mixer = dc.replace(mixer, state_heads=STATE_HEADS, window=window)
    return changed_settings(mixer)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")
