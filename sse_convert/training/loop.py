"""The training loop, the same for all three losses: rows, forward and backward, optimizer step, log, checkpoint."""

import contextlib
import dataclasses as dc
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sse_convert.console import Bar, progress, say
from sse_convert.errors import DataError, TrainingError
from sse_convert.modeling.layer import SSEAttention
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import Checkpoints
from sse_convert.training.data.feed import Step
from sse_convert.training.metrics import (
    HEALTH_EVERY,
    MetricsLog,
    gradient_norm,
    router_health,
    router_parameters,
    whole,
)
from sse_convert.training.objective import Batch, Objective, Part
from sse_convert.training.schedule import Schedule

MOST_BAD_STEPS = 10
"""steps in a row whose loss or gradient is not finite, after which training gives up"""


@dc.dataclass(frozen=True, slots=True)
class Progress:
    """Where a stage stands."""

    step: int = 0
    """optimizer steps done, skipped ones included"""
    skipped: int = 0
    """steps whose loss or gradient was not finite"""
    bad_in_a_row: int = 0
    """of those, how many came last"""


def train(
    objective: Objective,
    steps: Iterator[Step],
    stage: Stage,
    schedule: Schedule,
    checkpoints: Checkpoints,
    log: MetricsLog,
    start: Progress,
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

    Raises:
        TrainingError: too many steps in a row were not finite.
        DataError: the text cannot be used, or a step has nothing to predict.
    """
    accelerator, now = objective.accelerator, start
    with _bar(accelerator, stage, schedule, start) as bar:
        for step in steps:
            if now.step == schedule.steps:
                break
            began = time.monotonic()
            factor = schedule.factor(now.step)
            _set_rates(objective.parts, factor)
            values, tokens = _gradients(objective, step.batches, schedule)
            record: dict[str, Any] = {"step": now.step + 1, "tokens": (now.step + 1) * schedule.step_tokens, **values}
            record |= {"predicted": tokens, "lr": max(rate for p in objective.parts for rate in p.rates) * factor}
            if now.step % HEALTH_EVERY == 0 or now.step + 1 == schedule.steps:
                record |= _health(objective)
            record["grad_norm"], stepped = _update(objective, stage.clip, finite=math.isfinite(values["loss"]))
            now = Progress(now.step + 1, now.skipped + (not stepped), 0 if stepped else now.bad_in_a_row + 1)
            record["seconds"] = time.monotonic() - began
            log.write(record)
            if bar is not None:
                bar.update(schedule.step_tokens, note=f"loss {values['loss']:.4f}")
            if not stepped:
                _report_bad_step(accelerator, now, record)
            if now.step % stage.checkpoint_steps == 0 or now.step == schedule.steps:
                state = {**dc.asdict(now), "position": step.position, "memory": objective.memory()}
                checkpoints.save(now.step, objective.parts, state)
    return now


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
        moved = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}
        found = objective.backward(moved, weight=1 / tokens, share=share, last=i + 1 == len(batches))
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
    total = accelerator.reduce(torch.stack([value.double() for value in sums.values()]), "sum")
    return dict(zip(sums, total.tolist(), strict=True)), tokens


def _update(objective: Objective, clip: float, *, finite: bool) -> tuple[float, bool]:
    """Clip each part's gradient and step its optimizer, unless something is not finite.

    Returns:
        The gradient norm over all parts before clipping, and whether the weights were changed.
    """
    accelerator = objective.accelerator
    norms = []
    for part in objective.parts:
        accelerator.unscale_gradients(part.optimizer)
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(part.module.parameters(), clip))))
    norm = math.hypot(*norms)
    finite = finite and math.isfinite(norm)
    if finite or accelerator.scaler is not None:  # the scaler of fp16 lowers its scale in a step it skips
        for part in objective.parts:
            part.optimizer.step()
        finite = not any(part.optimizer.step_was_skipped for part in objective.parts)
    for part in objective.parts:
        part.optimizer.zero_grad()
    for layer in sse_attention(objective).values():
        layer.update_router_bias()
    return norm, finite


def sse_attention(objective: Objective) -> dict[int, SSEAttention]:
    """The SSE layers that the objective trains, by index."""
    layers: dict[int, SSEAttention] = objective.student.sse_layers()
    return layers


def _health(objective: Objective) -> dict[str, Any]:
    layers = sse_attention(objective).items()
    health = router_health({i: stats for i, layer in layers if (stats := layer.router_stats()) is not None})
    norms = [gradient_norm(router_parameters(part.module)) for part in objective.parts]
    found = [float(norm) for norm in norms if norm is not None]
    return {**health, "gate_grad_norm": math.hypot(*found)} if found else health


def _set_rates(parts: Sequence[Part], factor: float) -> None:
    for part in parts:
        for group, rate in zip(part.optimizer.param_groups, part.rates, strict=True):
            group["lr"] = rate * factor


def _report_bad_step(accelerator: Accelerator, now: Progress, record: dict[str, Any]) -> None:
    what = f"step {now.step}: loss {record['loss']}, gradient norm {record['grad_norm']}"
    if now.bad_in_a_row >= MOST_BAD_STEPS:
        raise TrainingError(
            f"{now.bad_in_a_row} steps in a row were not finite; last, {what}",
            expected="a finite loss and gradient",
            fix="lower lr, raise warmup, or set train.mixed_precision: no; then run again, from the last checkpoint",
        )
    if accelerator.is_main_process:
        say(f"{what}: not finite, weights left as they are")


@contextlib.contextmanager
def _bar(accelerator: Accelerator, stage: Stage, schedule: Schedule, start: Progress) -> Iterator[Bar | None]:
    """A progress bar in tokens on the main process, silence on the others."""
    total = schedule.steps * schedule.step_tokens
    if not accelerator.is_main_process:
        yield None
        return
    with progress(stage.name, total) as bar:
        bar.update(start.step * schedule.step_tokens)
        yield bar
