"""Steps whose loss or gradient is not finite: they are left out, and too many of them end the stage."""

from typing import Any

from sse_convert.errors import TrainingError
from sse_convert.training.checkpoint import Checkpoints

NOT_FINITE = "not finite"
IN_A_ROW = 10
"""steps left out one after the other after which the stage stops"""


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
            f"{in_a_row} steps in a row were not finite; last, {what}",
            expected="a finite loss and gradient",
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
