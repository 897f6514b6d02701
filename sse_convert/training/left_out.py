"""Steps whose loss or gradient is not finite: they are left out, and too many of them end the stage."""

from typing import Any

from accelerate import Accelerator

from sse_convert.console import say
from sse_convert.errors import TrainingError
from sse_convert.training.checkpoint import Checkpoints
from sse_convert.training.monitors import Monitor, Progress

NOT_FINITE = "not finite"
IN_A_ROW = 10
"""steps left out one after the other after which the stage stops"""


class LeftOut(Monitor):
    """Says which steps were left out.

    Args:
        checkpoints: of the stage.
        accelerator: of the stage.
    """

    def __init__(self, checkpoints: Checkpoints, accelerator: Accelerator) -> None:
        self._checkpoints, self._aloud = checkpoints, accelerator.is_main_process

    def say(self, now: Progress, record: dict[str, Any]) -> None:
        """Name a step that was left out.

        Raises:
            TrainingError: it is the last of `IN_A_ROW`.
        """
        if "left_out" not in record:
            return
        what = f"step {now.step}: loss {record['loss']}, gradient norm {record['grad_norm']}: {record['left_out']}"
        if now.bad_in_a_row >= IN_A_ROW:
            raise TrainingError(
                f"{now.bad_in_a_row} steps in a row were not finite; last, {what}",
                expected="a finite loss and gradient",
                fix=last_good(self._checkpoints),
            )
        if self._aloud:
            say(f"{what}, weights left as they are")

    def report(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """`left_out`: step, loss (None where not finite) and why."""
        return {
            "left_out": [
                {"step": record["step"], "loss": record["loss"], "why": record["left_out"]}
                for record in records
                if "left_out" in record
            ]
        }


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
