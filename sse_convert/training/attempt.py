"""One try at training a stage to its end, with what was left to the machine chosen: models, rows, monitors, loop."""

import dataclasses as dc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from sse_convert.console import say
from sse_convert.errors import HardwareError
from sse_convert.training import metrics
from sse_convert.training.align import Align
from sse_convert.training.compiling import LateCompiling
from sse_convert.training.context import choose_attention
from sse_convert.training.distill import Distill
from sse_convert.training.fit import Chosen, Fit, failures
from sse_convert.training.held_out import HeldOut, Looks, held_out_rows
from sse_convert.training.left_out import LeftOut
from sse_convert.training.loop import train
from sse_convert.training.metrics import MetricsLog
from sse_convert.training.model_objective import Student
from sse_convert.training.monitors import Monitor, Progress
from sse_convert.training.objective import Objective
from sse_convert.training.prefetch import Background, Step, steps
from sse_convert.training.router_watch import RouterWatch
from sse_convert.training.setup import load_student, load_teacher, stretch_rope
from sse_convert.training.stage_job import StageJob
from sse_convert.training.stage_record import HISTORY
from sse_convert.training.stage_report import AVERAGED, StageReport, rises
from sse_convert.training.uptrain import Uptrain
from sse_convert.training.work_folder import WorkFolder


def train_stage(ready: StageJob, work: WorkFolder, chosen: Chosen) -> tuple[Objective, StageReport]:
    """Train to the end. Where the first step of this start shows that its choices do not work, or memory ends in a
    later one, go on with others: from the newest checkpoint, or anew.

    Raises:
        HardwareError: they do not work, and several processes train, some of which may wait for this one.
    """
    while True:
        attempt = Attempt(ready, work, chosen)
        try:
            return attempt.train()
        except failures() as error:
            other = Fit(ready).otherwise(chosen, error)
            later = attempt.log.written and not isinstance(error, torch.OutOfMemoryError)
            if other is None or later:
                raise
            why = (str(error).splitlines() or [type(error).__name__])[0]
        chosen = other
        if not ready.alone:
            refusal = HardwareError(why, expected=chosen.line(), fix="start again: the stage goes on with these")
            work.write(chosen)
            raise refusal
        say(f"{ready.stage.name}: {why}")
        ready.accelerator.free_memory()
        work.keep(chosen)


class Attempt:
    """A try at training.

    Args:
        ready: the stage.
        work: its folder, opened; what was begun there goes on.
        chosen: settings without `auto`.
    """

    def __init__(self, ready: StageJob, work: WorkFolder, chosen: Chosen) -> None:
        self.ready, self.work, self.chosen = ready, work, chosen
        self.accelerator, self.name = ready.accelerator, ready.stage.name
        self.stage, self.settings = chosen.applied(ready.stage, ready.train)
        self.log = MetricsLog(work.path, self.accelerator)

    def train(self) -> tuple[Objective, StageReport]:
        """Set up, restore if there is something to restore, and train to the end."""
        checkpoints = self.work.checkpoints
        state = checkpoints.newest() or {}
        objective = self._objective(state.get("memory"))
        torch.manual_seed(self.settings.seed + self.accelerator.process_index)  # unless a checkpoint says otherwise
        now = Progress(**{field.name: state[field.name] for field in dc.fields(Progress) if field.name in state})
        if state:
            if self.ready.leads:
                say(f"{self.name}: continuing at step {now.step} of {self.ready.schedule.steps}")
            checkpoints.load(objective.parts)
        monitors = self._monitors(objective, state)
        if self.ready.leads:
            checkpoints.restore_log()
        try:
            with Background(self._steps(state.get("position"))) as rows:
                now = train(objective, rows, self.stage, self.ready.schedule, checkpoints, self.log, now, monitors)
        finally:
            objective.close()
        return objective, self._report(objective, now, monitors)

    def _objective(self, memory: dict[str, Any] | None) -> Objective:
        torch.compiler.reset()  # or rows of another length than the last stage's would be compiled for any length
        model = load_student(self.ready.files, self.ready.match.sse, self.accelerator)
        layers = model.sse_layers().values()
        reason = next(filter(None, (layer.trains_on_torch(self.accelerator.device) for layer in layers)), None)
        if reason is not None and self.ready.leads:
            say(f"{self.name}: PyTorch makes the gradients, slowly: {reason}")
        stretch_rope(choose_attention(model, self.stage), self.stage)
        if self.stage.loss == "layer_mse":
            teacher = self._teacher()
            first = next(self._steps(None)).batches if memory is None else []
            return Align(self.accelerator, model, teacher, self.stage, first=first, memory=memory)
        student = Student.of(model, self.accelerator, self.stage, self.settings)
        if self.stage.loss == "ce":
            return Uptrain(self.accelerator, student, self.stage, self.settings)
        return Distill(self.accelerator, student, self._teacher(), self.stage, self.settings)

    def _teacher(self) -> PreTrainedModel:
        return choose_attention(load_teacher(self.ready.job.files(), self.accelerator), self.stage)

    def _steps(self, position: dict[str, Any] | None) -> Iterator[Step]:
        """The stage's steps from a position of its rows on."""
        schedule = self.ready.schedule
        left = schedule.steps * schedule.rows - (position["row"] if position else 0)
        return steps(
            islice(self.ready.reader.rows(position), left),
            rows_per_step=schedule.rows,
            micro_batch=self.chosen.micro_batch,
            place=self.ready.place,
        )

    def _monitors(self, objective: Objective, saved: dict[str, Any]) -> list[Monitor]:
        """What looks at each step, as a training checkpoint left it."""
        return [
            *self._held_out(objective, saved.get(HeldOut.key)),
            LeftOut(self.work.checkpoints, self.accelerator),
            RouterWatch(objective, saved.get(RouterWatch.key)),
            LateCompiling(aloud=self.ready.leads),
        ]

    def _held_out(self, objective: Objective, memory: dict[str, Any] | None) -> list[Monitor]:
        """The looks at held-out text, if there are any."""
        looks = Looks.of(self.ready.job.recipe, self.stage)
        if looks is None or not (rows := held_out_rows(self.ready, looks)):
            return []
        return [HeldOut(objective, self.ready, looks, rows, self.chosen.micro_batch, memory)]

    def _report(self, objective: Objective, now: Progress, monitors: list[Monitor]) -> StageReport:
        records = metrics.read(self.work.path / metrics.FILE)
        losses = objective.curve(records)
        tail = losses[-AVERAGED:]
        state = self.work.checkpoints.newest() or {"position": {"sources": []}}
        return StageReport(
            name=self.name,
            loss=self.stage.loss,
            out=str(self.ready.out),
            steps=now.step,
            tokens=now.step * self.ready.schedule.step_tokens,
            skipped_steps=now.skipped,
            loss_first=losses[0] if losses else None,
            loss_last=sum(tail) / len(tail) if tail else None,
            seconds=sum(record["seconds"] for record in records),
            text_passes=[cursor[0] for cursor in state["position"]["sources"]],
            details=objective.details(records),
            rose=rises(losses),
            chosen=dc.asdict(self.chosen),
            extended=self.work.history.get(HISTORY, []),
            **{name: found for monitor in monitors for name, found in monitor.report(records).items()},
        )
