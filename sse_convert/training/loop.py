"""The training loop, the same for all three losses: rows, forward and backward, optimizer step, log, checkpoint."""

import contextlib
import dataclasses as dc
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from sse_convert.checkpoints.weights import nonfinite_tensors, some
from sse_convert.console import Bar, progress, say
from sse_convert.errors import DataError, TrainingError
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import Checkpoints
from sse_convert.training.left_out import NOT_FINITE, kept, last_good
from sse_convert.training.metrics import MetricsLog
from sse_convert.training.monitors import Monitor, Progress
from sse_convert.training.objective import Batch, Objective, Part, whole
from sse_convert.training.prefetch import Step
from sse_convert.training.schedule import Schedule
from sse_convert.training.stop import Stop

CLIP = 1.0
"""of the gradient norm of each part"""


def train(
    objective: Objective,
    steps: Iterator[Step],
    stage: Stage,
    schedule: Schedule,
    checkpoints: Checkpoints,
    log: MetricsLog,
    start: Progress,
    monitors: Sequence[Monitor],
) -> Progress:
    """Train from `start` to the end of the schedule.

    Args:
        objective: the loss and what it trains.
        steps: this process's rows, from `start` on.
        stage: settings.
        schedule: steps and learning rates.
        checkpoints: where to save.
        log: where to write.
        start: how far an earlier run came.
        monitors: look at each step.

    Raises:
        TrainingError: too many steps were left out, or weights are not finite.
        DataError: the text cannot be used, or a step has nothing to predict.
    """
    accelerator, now = objective.accelerator, start
    with _bar(accelerator, stage, schedule, start) as bar, Stop(accelerator) as stop:
        for step in steps:
            if now.step == schedule.steps:
                break
            began = time.monotonic()
            number, last = now.step + 1, now.step + 1 == schedule.steps
            factor = schedule.factor(now.step)
            _set_rates(objective.parts, factor)
            values, tokens = _gradients(objective, step.batches, schedule)
            record: dict[str, Any] = {"step": number, "tokens": number * schedule.step_tokens, **values}
            record |= {"predicted": tokens, "lr": max(rate for p in objective.parts for rate in p.rates) * factor}
            for monitor in monitors:
                record |= monitor.before_update(number, last=last)
            now = _stepped(objective, now, record)
            record["seconds"] = time.monotonic() - began
            for monitor in monitors:
                record |= monitor.after_update(number, last=last)
            log.write(record)
            if bar is not None:
                notes = "".join(monitor.note() for monitor in monitors)
                bar.update(schedule.step_tokens, note=f"loss {values['loss']:.4f}{notes}")
            for monitor in monitors:
                monitor.say(now, record)
            stopping, due = stop.wanted(), checkpoints.due(now.step, stage.checkpoint_steps)
            if last or due or stopping:
                state = {**dc.asdict(now), "position": step.position, "memory": objective.memory()}
                state |= {monitor.key: monitor.memory() for monitor in monitors if monitor.key}
                _save(objective, now, state, checkpoints, last=last, stopping=stopping)
            if stopping:
                stop.obey()
        if stop.wanted():  # it came while the last step was saved
            stop.obey()
    return now


def _save(
    objective: Objective,
    now: Progress,
    state: dict[str, Any],
    checkpoints: Checkpoints,
    *,
    last: bool,
    stopping: bool,
) -> None:
    """Save, unless that would push out the last good checkpoint: while steps are left out, and weights that are not
    finite.

    Raises:
        TrainingError: weights are not finite, and no signal ends the stage anyway.
    """
    if now.bad_in_a_row and not last:
        why = f"the last {now.bad_in_a_row} steps were left out"
    elif bad := nonfinite_weights(objective):
        why = f"weights are not finite after step {now.step}: {some(bad)}"
        if not stopping:
            raise TrainingError(why, expected="finite weights", fix=last_good(checkpoints))
    else:
        checkpoints.save(now.step, objective.parts, state)
        return
    if stopping and objective.accelerator.is_main_process:
        say(f"{why}; {kept(checkpoints)}")


def nonfinite_weights(objective: Objective) -> list[str]:
    """Names of the tensors that are not finite, of all processes' shards; every process must call it."""
    own = [name for part in objective.parts for name in nonfinite_tensors(part.module)]
    return sorted(set(gather_object(own)))


def _gradients(objective: Objective, batches: Sequence[Batch], schedule: Schedule) -> tuple[dict[str, float], int]:
    """Forward and backward of one step's micro batches. Returns the step's means and the tokens that were predicted."""
    accelerator = objective.accelerator
    counted = torch.tensor(sum(map(objective.count, batches)), device=accelerator.device)
    tokens = int(accelerator.reduce(counted, "sum"))
    if tokens == 0:
        raise DataError(
            "a whole optimizer step has no token to predict",
            expected="some text, or with loss_mask: assistant some assistant turns, in every step",
            fix="raise batch_tokens, check the chat source, or set loss_mask: all",
        )
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        share = batch["input_ids"].numel() / schedule.step_tokens
        moved, last = objective.on_device(batch), i + 1 == len(batches)
        found = objective.backward(moved, weight=1 / tokens, share=share, last=last)
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
    total = accelerator.reduce(torch.stack([value.double() for value in sums.values()]), "sum")
    return dict(zip(sums, total.tolist(), strict=True)), tokens


def _stepped(objective: Objective, now: Progress, record: dict[str, Any]) -> Progress:
    """Clip each part's gradient and step its optimizer, or leave the step out where something is not finite; completes
    the record, whose gradient norm is that over all parts before clipping. Returns where the stage stands."""
    norms = [float(whole(torch.nn.utils.clip_grad_norm_(part.module.parameters(), CLIP))) for part in objective.parts]
    record["grad_norm"] = norm = math.hypot(*norms)
    finite = math.isfinite(record["loss"]) and math.isfinite(norm)
    for part in objective.parts:
        if finite:
            part.optimizer.step()
        part.optimizer.zero_grad()
    after = dc.replace(now, step=now.step + 1, bad_in_a_row=0)
    if finite:
        return after
    record["left_out"] = NOT_FINITE
    return dc.replace(after, skipped=now.skipped + 1, bad_in_a_row=now.bad_in_a_row + 1)


def _set_rates(parts: Sequence[Part], factor: float) -> None:
    for part in parts:
        for group, rate in zip(part.optimizer.param_groups, part.rates, strict=True):
            group["lr"] = rate * factor


@contextlib.contextmanager
def _bar(accelerator: Accelerator, stage: Stage, schedule: Schedule, start: Progress) -> Iterator[Bar | None]:
    """A progress bar in tokens on the main process, silence on the others."""
    total = schedule.steps * schedule.step_tokens
    if not accelerator.is_main_process:
        yield None
        return
    with progress(stage.name, total, start.step * schedule.step_tokens) as bar:
        yield bar
