"""How long the stages of a recipe take on a machine, and the share of the rule's tokens that a time holds."""

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from typing import Any

from sse_convert.errors import UsageError

LEAST_STEPS = 20
"""of a stage in the shortest time; fewer hardly move anything. Where a step just became twice as large, a longer time
has 14"""
_HALVINGS = 30
_FINER, _TRIED = 1.1, 120
"""shares that are tried, each so many times the one before"""
Stages = Sequence[dict[str, Any]]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Hours of a machine."""

    tokens: tuple[float, ...]
    """of a token, by stage"""
    beside: float = 0.0
    """of choosing, calibrating and measuring"""

    def stage_hours(self, stages: Stages) -> list[float]:
        """Hours of each stage."""
        return [each * stage["tokens"] for each, stage in zip(self.tokens, stages, strict=True)]

    def hours(self, stages: Stages) -> float:
        """Of all."""
        return self.beside + sum(self.stage_hours(stages))


def least_share(stages_of: Callable[[float], Stages], most: float) -> float:
    """The least share of the rule's tokens with which each stage has some steps; `most` where none has.

    Args:
        stages_of: stages of a share.
        most: that there is text for.
    """

    shares = (most * _FINER**i for i in range(-_TRIED, 0))  # one by one: steps grow as well, by powers of two
    enough = (
        share
        for share in shares
        if all(stage["tokens"] >= LEAST_STEPS * stage["batch_tokens"] for stage in stages_of(share))
    )
    return next(enough, most)


def fitted_share(pace: Pace, hours: float, stages_of: Callable[[float], Stages], most: float) -> float:
    """The largest share of the rule's tokens that a time holds.

    Args:
        pace: of the machine.
        hours: that there are.
        stages_of: stages of a share.
        most: share at most.

    Raises:
        UsageError: the time holds too few steps to do anything.
    """
    least = least_share(stages_of, most)
    if (needed := pace.hours(stages_of(least))) > hours:
        raise UsageError(
            f"{hours:g} hours are too short: {LEAST_STEPS} steps of each stage take this machine about {needed:.2g}",
            expected="time for training beside choosing, calibrating and measuring",
            fix=f"give --hours {math.ceil(needed * 11) / 10:g}",
        )
    return _largest(lambda share: pace.hours(stages_of(share)) <= hours, least, most)


def _largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest share up to which something holds that no longer does above it."""
    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
