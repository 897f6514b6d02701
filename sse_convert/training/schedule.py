"""How a token budget becomes optimizer steps, and the learning rate of each."""

import dataclasses as dc
import math

from sse_convert.errors import TrainingError
from sse_convert.recipe.schema import Stage
from sse_convert.report import counted


@dc.dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a stage. A step uses the same rows whatever the number of processes and the micro batch."""

    steps: int
    """optimizer steps"""
    rows: int
    """rows per step, over all processes"""
    seq_len: int
    """tokens per row"""
    warmup: int
    """steps with a rising learning rate"""
    floor: float
    """end of the cosine, as a share of the peak"""

    @staticmethod
    def of(stage: Stage) -> "Schedule":
        """The schedule of a stage; a last step that the budget does not fill counts as a whole one."""
        rows = -(-stage.batch_tokens // stage.seq_len)
        steps = -(-stage.tokens // (rows * stage.seq_len))
        return Schedule(steps, rows, stage.seq_len, math.ceil(stage.warmup * steps), stage.min_lr)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.seq_len

    def factor(self, step: int) -> float:
        """Learning rate of a step (from 0) as a share of the peak: linear warm-up, then a cosine down to the floor."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def check_processes(self, processes: int) -> None:
        """Make sure that the rows of a step can be dealt out evenly.

        Raises:
            TrainingError: they cannot.
        """
        if self.rows % processes:
            below = self.rows // processes * processes
            near = " or ".join(str(rows * self.seq_len) for rows in (below, below + processes) if rows)
            raise TrainingError(
                f"batch_tokens makes {counted(self.rows, 'row')} of {self.seq_len} tokens, for {processes} processes",
                expected="a number of rows that the processes can share evenly",
                fix=f"set batch_tokens to {near}, or launch another number of processes",
            )
