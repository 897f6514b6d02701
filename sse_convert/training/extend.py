"""A finished stage whose end has changed, by its token budget, goes on from its last training checkpoint.

It is never mixed with what was made from its old end, which is set aside. Learning rates follow the schedule of the new
budget from there on. Where that gives other rates to steps that were made already (a cosine does, `min_lr: 1` without
warm-up does not), the result is not that of the whole budget from the start: this is said, kept in stage.json, and
makes another identity.
"""

import dataclasses as dc
from pathlib import Path
from typing import Any

from sse_convert.errors import TrainingError
from sse_convert.recipe.schema import Stage
from sse_convert.report import format_number
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_record import changes


def differs_in_end(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the inputs of two stages are the same but for the budget."""
    return bool(changes(before, now)) and not changes(_endless(before), _endless(now))


def _endless(inputs: dict[str, Any]) -> dict[str, Any]:
    stage = {key: value for key, value in inputs.get("stage", {}).items() if key != "tokens"}
    return inputs | {"stage": stage}


def refuse_less(out: Path, work: Path, before: int, now: int) -> TrainingError:
    """The error of a budget that is less than what was trained on.

    Args:
        out: folder of the stage.
        work: that of its training checkpoints.
        before: tokens that were trained on.
        now: tokens of the recipe.
    """
    return TrainingError(
        f"{out} was trained on {before:,} tokens, the recipe's budget is {now:,} (tokens)",
        expected=f"{before:,} or more",
        fix=f"raise tokens, or delete {out}, {work} and what was made from them to train anew",
    )


@dc.dataclass(frozen=True, slots=True)
class Extension:
    """A stage that goes on with another budget.

    Args:
        stage: with the new budget.
        tokens: the old one.
        step: optimizer steps that were made.
    """

    stage: Stage
    tokens: int
    step: int

    @property
    def seamless(self) -> bool:
        """Whether the steps that were made had the learning rates of the new budget."""
        old, new = Schedule.of(dc.replace(self.stage, tokens=self.tokens)), Schedule.of(self.stage)
        return all(old.factor(step) == new.factor(step) for step in range(self.step))

    def note(self) -> dict[str, Any]:
        """JSON-ready, an entry of `HISTORY` in the stage's inputs."""
        return {"step": self.step, "tokens": self.tokens, "seamless": self.seamless}

    def line(self) -> str:
        """What happens, for a person."""
        old, new = Schedule.of(dc.replace(self.stage, tokens=self.tokens)), Schedule.of(self.stage)
        budgets = f"{format_number(self.tokens)} to {format_number(self.stage.tokens)} tokens"
        head = f"{self.stage.name}: the budget went from {budgets} after step {self.step:,}"
        if self.seamless or self.step == 0:
            return f"{head}; learning rates are those of the whole budget from the start"
        rates = [f"{schedule.factor(step):.2f}" for schedule, step in ((old, self.step - 1), (new, self.step))]
        return (
            f"warning: {head}: the learning rate follows the cosine of {new.steps:,} steps from here on and goes from "
            f"{rates[0]} to {rates[1]} of its peak, so the result is not that of {format_number(self.stage.tokens)} "
            "tokens from the start"
        )
