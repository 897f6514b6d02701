"""What a training stage returns."""

import dataclasses as dc
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from sse_convert.report import FieldsReport, counted, format_number, table
from sse_convert.training.held_out import NAMES, is_worse

AVERAGED = 10
"""steps at the end that the final loss is averaged over"""
FEWEST_STEPS = 10
"""steps below which a stage is hardly training"""


def rises(losses: Sequence[float]) -> bool:
    """Whether a loss ends above its start by more than its noise.

    The noise of one step is taken from the median difference of neighbouring steps, which a few spikes do not move.

    Args:
        losses: of each step.
    """
    if len(losses) < FEWEST_STEPS:
        return False
    noise = median(abs(b - a) for a, b in pairwise(losses)) / 0.954  # of a normal difference
    return fmean(losses[-AVERAGED:]) - losses[0] > 2 * noise * math.sqrt(1 + 1 / AVERAGED)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageReport(FieldsReport):
    """A finished training stage."""

    name: str
    """stage name"""
    loss: str
    """kind of loss"""
    out: str
    """checkpoint folder"""
    steps: int
    """optimizer steps"""
    tokens: int
    """tokens trained on"""
    skipped_steps: int
    """steps left out because something was not finite"""
    loss_first: float | None
    """loss of the first step; None if there was nothing to train"""
    loss_last: float | None
    """mean loss of the last steps"""
    seconds: float
    """time spent in steps"""
    text_passes: list[int]
    """how often each training source was read to its end"""
    details: dict[str, Any]
    """per-layer errors of layer_mse"""
    left_out: list[dict[str, Any]] = dc.field(default_factory=list)
    """step, loss and reason of each step left out"""
    collapsed: list[str] = dc.field(default_factory=list)
    """layers whose router collapsed, each with what to do"""
    rose: bool = False
    """whether the loss ended above its start by more than its noise; told where no held-out text was looked at"""
    chosen: dict[str, Any] = dc.field(default_factory=dict)
    """micro_batch, gradient_checkpointing and compile as they were, and the processes"""
    extended: list[dict[str, Any]] = dc.field(default_factory=list)
    """earlier budgets: `tokens`, the `step` reached then, and whether learning rates were `seamless`"""
    held_out: dict[str, Any] = dc.field(default_factory=dict)
    """looks at held-out text: what is `judged`, and `step` and `value` of the `first`, the `last` and the `best` one;
    empty without looks"""
    already_done: bool = False
    """whether an earlier run had finished it"""

    def lines(self) -> list[str]:
        """The result for a person."""
        if self.loss_first is None or self.loss_last is None:
            summary = "nothing to train"
        else:
            speed = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
            summary = (
                f"loss {self.loss_first:.4f} -> {self.loss_last:.4f} in {counted(self.steps, 'step')}, "
                f"{format_number(self.tokens)} tokens{speed}"
            )
        bad = f", {counted(self.skipped_steps, 'step')} left out (not finite)" if self.skipped_steps else ""
        done = " (done before)" if self.already_done else ""
        head = f"{self.name} ({self.loss}): {summary}{bad}{done}"
        warnings = [f"warning: {warning}" for warning in self.warnings()]
        return [
            head,
            *self._held_out(),
            *warnings,
            *self._passes(),
            *self._layers(),
            *self.collapsed,
            f"in {self.out}" if self.already_done else f"wrote {self.out}",
        ]

    def warnings(self) -> list[str]:
        """What looks wrong, in words."""
        found = [
            f"{self.name}: the budget was {format_number(budget['tokens'])} tokens up to step {budget['step']:,}, with "
            "other learning rates than those of the whole budget"
            for budget in self.extended
            if not budget["seamless"]
        ]
        best, last = self.held_out.get("best"), self.held_out.get("last")
        if best and last and is_worse(last["value"], best["value"]):
            found.append(
                f"{self.name}: {NAMES[self.held_out['judged']]} was {best['value']:.4f} at step {best['step']:,} and "
                f"ended at {last['value']:.4f}; lower tokens or lr, or add text"
            )
        if self.rose and not best:
            found.append(f"{self.name}: the loss ended above its start; lower lr, or lengthen the warmup")
        if 0 < self.steps < FEWEST_STEPS:
            found.append(
                f"{self.name}: hardly trained by {counted(self.steps, 'step')}; raise tokens, or lower batch_tokens, "
                f"for {FEWEST_STEPS} or more"
            )
        return found

    def _held_out(self) -> list[str]:
        if not self.held_out.get("first"):
            return []
        first, last, best = (self.held_out[key] for key in ("first", "last", "best"))
        line = f"{NAMES[self.held_out['judged']]} {first['value']:.4f} at step {first['step']:,} -> {last['value']:.4f}"
        if best is None or best["step"] == last["step"]:
            return [line]
        return [f"{line}, best {best['value']:.4f} at step {best['step']:,}"]

    def _passes(self) -> list[str]:
        if max(self.text_passes, default=0) < 1:
            return []
        times = f"{', '.join(map(str, self.text_passes))} time{'s' * (self.text_passes != [1])}"
        return [f"text was repeated: sources were read to their end {times}"]

    def _layers(self) -> list[str]:
        layers = self.details.get("layers", {})
        if not layers:
            return []
        rows = [(i, error["before"], error["after"]) for i, error in layers.items()]
        return table(("layer", "error before", "error after"), rows)
