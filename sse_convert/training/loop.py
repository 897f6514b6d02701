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
from sse_convert.modeling.layer import SSEAttention
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import Checkpoints
from sse_convert.training.compiling import LateCompiling
from sse_convert.training.held_out import HeldOut
from sse_convert.training.left_out import NOT_FINITE, check_left_out, kept, last_good
from sse_convert.training.metrics import (
    HEALTH_EVERY,
    MetricsLog,
    gradient_norm,
    router_health,
    router_parameters,
    whole,
)
from sse_convert.training.objective import Batch, Objective, Part
from sse_convert.training.prefetch import Step
from sse_convert.training.router_collapse import LOOKS, CollapseWatch, collapse_message, load_spread
from sse_convert.training.schedule import Schedule
from sse_convert.training.stop import Stop

CLIP = 1.0
"""of the gradient norm of each part"""


@dc.dataclass(frozen=True, slots=True)
class Progress:
    """Where a stage stands."""

    step: int = 0
    """optimizer steps done, skipped ones included"""
    skipped: int = 0
    """steps that were left out"""
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
    watch: CollapseWatch,
    held_out: HeldOut | None = None,
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
        watch: looks at routers.
        held_out: looks at held-out text; None for none.

    Raises:
        TrainingError: too many steps were left out, or weights are not finite.
        DataError: the text cannot be used, or a step has nothing to predict.
    """
    accelerator, now, compiling = objective.accelerator, start, LateCompiling()
    with _bar(accelerator, stage, schedule, start) as bar, Stop(accelerator) as stop:
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
                record |= _health(objective, watch)
            now = _stepped(objective, stage, now, record)
            record["seconds"] = time.monotonic() - began
            last = now.step == schedule.steps
            if held_out is not None:
                record |= held_out.look(now.step, last=last)
            log.write(record)
            if bar is not None:
                note = f"loss {values['loss']:.4f}{'' if held_out is None else held_out.note()}"
                bar.update(schedule.step_tokens, note=note)
            _report(accelerator, watch, now, record, checkpoints)
            compiling.after(now.step, aloud=accelerator.is_main_process)
            stopping, due = stop.wanted(), checkpoints.due(now.step, stage.checkpoint_steps)
            if last or due or stopping:
                state = {**dc.asdict(now), "position": step.position, "memory": objective.memory()}
                state |= {"guard": watch.memory()}
                _save(objective, now, state, checkpoints, held_out, last=last, stopping=stopping)
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
    held_out: HeldOut | None,
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
        if held_out is not None:
            state |= {"held_out": held_out.memory}
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


def _stepped(objective: Objective, stage: Stage, now: Progress, record: dict[str, Any]) -> Progress:
    """Make the step of the gradients at hand, or leave it out; completes the record. Returns where the stage stands."""
    record["grad_norm"], made = _update(objective, record["loss"])
    after = dc.replace(now, step=now.step + 1, bad_in_a_row=0)
    if made:
        return after
    record["left_out"] = NOT_FINITE
    return dc.replace(after, skipped=now.skipped + 1, bad_in_a_row=now.bad_in_a_row + 1)


def _update(objective: Objective, loss: float) -> tuple[float, bool]:
    """Clip each part's gradient and step its optimizer, unless something is not finite.

    Args:
        objective: holds the gradients.
        loss: of the step.

    Returns:
        The gradient norm over all parts before clipping, and whether the step was made.
    """
    norms = [float(whole(torch.nn.utils.clip_grad_norm_(part.module.parameters(), CLIP))) for part in objective.parts]
    norm = math.hypot(*norms)
    finite = math.isfinite(loss) and math.isfinite(norm)
    for part in objective.parts:
        if finite:
            part.optimizer.step()
        part.optimizer.zero_grad()
    return norm, finite


def sse_layers_of(objective: Objective) -> dict[int, SSEAttention]:
    """The SSE layers that the objective trains, by index."""
    layers: dict[int, SSEAttention] = objective.student.sse_layers()
    return layers


def _health(objective: Objective, watch: CollapseWatch) -> dict[str, Any]:
    layers = sse_layers_of(objective)
    stats = {i: stats for i, layer in layers.items() if (stats := layer.router_stats()) is not None}
    health = router_health(stats)
    if stats:
        own = [load_spread(health["routers"][str(i)]["load"], layers[i].mixer.top_k) for i in stats]
        device = objective.accelerator.device
        shared = objective.accelerator.reduce(torch.tensor(own, dtype=torch.float32, device=device), "mean")
        if collapsed := watch.look(dict(zip(stats, shared.tolist(), strict=True))):
            health["collapsed"] = collapsed
    norms = [gradient_norm(router_parameters(part.module)) for part in objective.parts]
    found = [float(norm) for norm in norms if norm is not None]
    return {**health, "gate_grad_norm": math.hypot(*found)} if found else health


def _set_rates(parts: Sequence[Part], factor: float) -> None:
    for part in parts:
        for group, rate in zip(part.optimizer.param_groups, part.rates, strict=True):
            group["lr"] = rate * factor


def _report(
    accelerator: Accelerator, watch: CollapseWatch, now: Progress, record: dict[str, Any], checkpoints: Checkpoints
) -> None:
    """Say what is wrong with a step; an error where there is too much of it."""
    if "left_out" in record:
        what = f"step {now.step}: loss {record['loss']}, gradient norm {record['grad_norm']}"
        what = f"{what}: {record['left_out']}"
        check_left_out(now.bad_in_a_row, what, checkpoints)
        if accelerator.is_main_process:
            say(f"{what}, weights left as they are")
    for i in record.get("collapsed", []):
        if watch.counts[i] == LOOKS and accelerator.is_main_process:
            say(collapse_message(i, record["routers"][str(i)]["load"], now.step))


@contextlib.contextmanager
def _bar(accelerator: Accelerator, stage: Stage, schedule: Schedule, start: Progress) -> Iterator[Bar | None]:
    """A progress bar in tokens on the main process, silence on the others."""
    total = schedule.steps * schedule.step_tokens
    if not accelerator.is_main_process:
        yield None
        return
    with progress(stage.name, total, start.step * schedule.step_tokens) as bar:
        yield bar
