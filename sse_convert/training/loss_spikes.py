"""Steps whose loss jumps or is not finite: they are left out, and too many of them end the stage."""

import dataclasses as dc
import math
import statistics
from typing import Any

from sse_convert.errors import TrainingError
from sse_convert.training.checkpoint import Checkpoints

NOT_FINITE = "not finite"
SPIKE = "loss spike"
MAD_TO_SIGMA = 1.4826
"""standard deviation of a normal distribution over its median absolute deviation"""
WINDOW = 100
"""accepted steps that median and deviation are taken over; nothing is judged before there are as many"""
IN_A_ROW = 10
"""steps left out one after the other after which the stage stops"""
LEAST_DEVIATION = 1e-3
"""of the median: deviation that a window of nearly equal losses is taken to have"""


@dc.dataclass(slots=True)
class SpikeWatch:
    """Judges the loss of each step against the accepted ones before it."""

    limit: float | None
    """robust standard deviations above the median; None leaves out only what is not finite"""
    losses: list[float] = dc.field(default_factory=list)
    """accepted losses, the last `WINDOW`"""

    def zscore(self, loss: float) -> float | None:
        """How many robust standard deviations a loss lies above the median; None while too few are known."""
        if self.limit is None or len(self.losses) < WINDOW or not math.isfinite(loss):
            return None
        median = statistics.median(self.losses)
        deviation = MAD_TO_SIGMA * statistics.median(abs(x - median) for x in self.losses)
        return (loss - median) / max(deviation, LEAST_DEVIATION * abs(median), math.ulp(0.0))

    def verdict(self, loss: float) -> str | None:
        """Why a step must be left out; None if it need not."""
        if not math.isfinite(loss):
            return NOT_FINITE
        score = self.zscore(loss)
        return SPIKE if score is not None and self.limit is not None and score > self.limit else None

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was made."""
        if self.limit is not None:
            self.losses = [*self.losses, loss][-WINDOW:]


def check_left_out(in_a_row: int, what: str, checkpoints: Checkpoints) -> None:
    """Give up where too many steps were left out.

    Args:
        in_a_row: steps left out one after the other, up to this one.
        what: the last one, for the message.
        checkpoints: of the stage.

    Raises:
        TrainingError: `IN_A_ROW` is reached.
    """
    if in_a_row >= IN_A_ROW:
        raise TrainingError(
            f"{in_a_row} steps in a row were not finite or had loss spikes; last, {what}",
            expected="a finite loss and gradient, without jumps",
            fix=last_good(checkpoints),
        )


def last_good(checkpoints: Checkpoints) -> str:
    """Where weights from before the trouble are, and how to go on."""
    return (
        f"{kept(checkpoints)}; run again to go on from there as before, or delete {checkpoints.folder} and start the "
        "stage anew with a lower lr, a longer warmup, or train.mixed_precision: no"
    )


def kept(checkpoints: Checkpoints) -> str:
    """The newest checkpoint in words. Its weights are finite, and it was written before the trouble."""
    path = checkpoints.newest_path()
    return "no checkpoint was written yet" if path is None else f"the last good checkpoint is {path}"


def left_out_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of a log that were left out: step, loss (None where not finite) and why."""
    return [
        {"step": record["step"], "loss": record["loss"], "why": record["left_out"]}
        for record in records
        if "left_out" in record
    ]
