"""One training stage as a command: checkpoint in, checkpoint out, resumed where it stopped.

While it runs, everything lives in `<out>.work` (inputs.json, metrics.jsonl, training checkpoints).
The finished checkpoint appears under its own name at once, with the metrics and a stage.json that says what it was
made from. The last training checkpoint stays in `<out>.work`: a larger budget goes on from there.
"""

import contextlib
import dataclasses as dc
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files
from sse_convert.checkpoints.identity import STAGE_FILE, read_sealed, read_stage_record, write_sealed
from sse_convert.checkpoints.manifest import write_manifest
from sse_convert.checkpoints.open import whole_checkpoint
from sse_convert.checkpoints.output_folder import check_output, new_folder, remove_partial
from sse_convert.checkpoints.provenance import UNTRAINED, read_provenance
from sse_convert.checkpoints.run_lock import LOCK, run_lock
from sse_convert.checkpoints.teacher import refuse_quantised, source_view
from sse_convert.console import say
from sse_convert.errors import DataError, HardwareError, OutputError, RecipeError, TrainingError
from sse_convert.process_memory import memory_for
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.surgery.compatibility import match_recipe
from sse_convert.surgery.guessing_teacher import warn_of_guessing
from sse_convert.surgery.stage_memory import still_the_teachers
from sse_convert.training import fit, metrics
from sse_convert.training.align import Align
from sse_convert.training.checkpoint import Checkpoints, writing
from sse_convert.training.compiling import COMPILED, LateCompiling, kept_code
from sse_convert.training.context import choose_attention, lay_out
from sse_convert.training.distill import Distill
from sse_convert.training.extend import Extension, differs_in_end, refuse_less, set_aside
from sse_convert.training.fit import Chosen, Fit
from sse_convert.training.held_out import HeldOut, Looks, held_out_rows
from sse_convert.training.left_out import LeftOut
from sse_convert.training.loop import train
from sse_convert.training.metrics import MetricsLog
from sse_convert.training.model_objective import Student
from sse_convert.training.monitors import Monitor, Progress
from sse_convert.training.objective import Objective
from sse_convert.training.prefetch import Background, Step, steps
from sse_convert.training.router_watch import RouterWatch
from sse_convert.training.schedule import Schedule
from sse_convert.training.setup import load_student, load_teacher, make_accelerator, stretch_rope
from sse_convert.training.stage_inputs import (
    check_stage,
    stage_inputs,
    stage_reader,
)
from sse_convert.training.stage_record import HISTORY, changes, finished, refuse_changes, write_record
from sse_convert.training.stage_report import AVERAGED, StageReport, rises
from sse_convert.training.uptrain import Uptrain

Loss = Literal["layer_mse", "kl", "ce"]
INPUTS = "inputs.json"
SHARD_SIZE = "5GB"
_WORK_FILES = {INPUTS, LOCK, COMPILED, fit.FILE, metrics.FILE}


def pick_stage(recipe: Recipe, loss: Loss, name: str | None = None) -> Stage:
    """The recipe's stage with this loss.

    Raises:
        RecipeError: there is none, or there are several and `name` chooses none of them.
    """
    found = [stage for stage in recipe.stages if stage.loss == loss and name in (None, stage.name)]
    if len(found) == 1:
        return found[0]
    names = [stage.name for stage in recipe.stages if stage.loss == loss]
    what = f"no stage {name!r}" if name else f"{len(names)} stages"
    raise RecipeError(
        f"the recipe has {what} with loss {loss}",
        expected=f"one of {names}" if names else f"a stage with loss: {loss}",
        fix="name it with --stage" if names else "add it to the recipe",
    )


def run_stage(
    recipe: Recipe,
    stage: Stage,
    checkpoint: Path,
    out: Path,
    *,
    later: Sequence[Path] = (),
    try_teacher: bool = False,
) -> StageReport:
    """Run one stage, continue it, also to a larger budget, or report that it is finished.

    Args:
        recipe: model, layers, data and train are read beside the stage.
        stage: what to do.
        checkpoint: a converted checkpoint.
        out: the folder to make.
        later: what was made from it, in order; set aside where the budget of a finished stage has changed.
        try_teacher: warn of a teacher that guesses, before the first step.

    Raises:
        TrainingError: an earlier run in `out` had other inputs, more tokens or goes on, the settings do not fit the
            processes, or training does not stay finite.
        DataError: the text cannot be used.
        CheckpointError: a checkpoint cannot be loaded, or is not converted.
        RecipeError: the checkpoint has other layers than the recipe, or rows are longer than the model's context.
        OutputError: `out` exists and is no finished stage, or cannot be written.
        HardwareError: a parallel mode, backend or precision is not offered.
    """
    run = _StageRun(recipe, stage, Path(checkpoint), Path(out), later)
    if (done := run.finished()) is not None:
        return done
    with memory_for(f"training {out}"), run.opened():
        if try_teacher:
            run.try_teacher()
        run.prepare()
        try:
            objective, report = run.train()
            run.write(objective, report)
        except KeyboardInterrupt:
            run.say_where()
            raise
        except DataError as error:
            raise run.with_price(error) from error
    run.trim_work()
    run.accelerator.free_memory()
    return report


class _StageRun:
    """A stage in progress. Arguments and errors as of `run_stage`."""

    def __init__(self, recipe: Recipe, stage: Stage, checkpoint: Path, out: Path, later: Sequence[Path]) -> None:
        self.recipe, self.stage, self.checkpoint, self.out, self.later = recipe, stage, checkpoint, out, later
        self.work = out.with_name(f"{out.name}.work")
        self.schedule, self.train_settings = Schedule.of(stage), recipe.train
        self.accelerator = make_accelerator(recipe.train)
        self.place = lay_out(self.accelerator, stage)
        check_stage(recipe, stage, self.accelerator)
        self.files = files = whole_checkpoint(checkpoint)
        refuse_quantised(files)
        self.match = match_recipe(recipe, files)
        self.fit = Fit(
            stage=stage,
            train=recipe.train,
            accelerator=self.accelerator,
            files=files,
            match=self.match,
            shared=still_the_teachers(recipe.stages, stage),
        )
        self.reader = stage_reader(recipe, stage, checkpoint)
        self.inputs = stage_inputs(recipe, stage, checkpoint, self.reader, self.match)

    def finished(self) -> StageReport | None:
        """The report of an earlier run that came to the end of this budget, if there is one."""
        self.goes_on = (self.out / STAGE_FILE).is_file() and self._goes_on(read_stage_record(self.out)["inputs"])
        if self.goes_on or (done := finished(self.out, self.inputs)) is None:
            return None
        return dc.replace(StageReport(**done), already_done=True)

    def _goes_on(self, before: dict[str, Any]) -> bool:
        """Whether a finished stage is the same but for its end, and can go on from there.

        Raises:
            TrainingError: its budget was larger, or its training checkpoints are gone.
        """
        before = {key: value for key, value in before.items() if key != HISTORY}
        if not differs_in_end(before, self.inputs):
            return False
        tokens = before["stage"]["tokens"]
        if tokens > self.stage.tokens:
            raise refuse_less(self.out, self.work, tokens, self.stage.tokens)
        if not any(self.work.glob("step-*")):
            raise TrainingError(
                f"{self.out} was trained on {tokens:,} tokens, and the training checkpoint in {self.work} is gone",
                expected=f"tokens: {tokens}, or the checkpoint, to go on from",
                fix=f"put more tokens into a stage of their own, or delete {self.out} to train it anew",
            )
        return True

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make the work folder, or check that it belongs to these inputs; only one run at a time has it open."""
        before = read_sealed(self.work / INPUTS)
        if before is not None and any(self.work.glob("step-*")):  # else there is nothing to lose
            self._check_inputs(before)
        self.accelerator.wait_for_everyone()
        with contextlib.ExitStack() as held:
            if self.accelerator.is_main_process:
                if before is None:
                    if not self.goes_on:
                        check_output(self.out)
                    self._check_work()
                    self.work.mkdir(exist_ok=True)
                held.enter_context(run_lock(self.work))
                if self.goes_on:
                    say(f"{self.stage.name}: what was made before is now in {set_aside(self.out, self.later)}")
                check_output(self.out)  # another run may have come to the end meanwhile
                remove_partial(self.out)
            self.accelerator.wait_for_everyone()
            self.checkpoints = Checkpoints(self.work, self.accelerator)
            self._keep_inputs(before)
            held.enter_context(kept_code(self.work, tidy=self.accelerator.is_main_process))
            yield

    def _foreign(self) -> list[str]:
        """What lies in the work folder and was written by no stage."""
        found = [path.name for path in self.work.iterdir()] if self.work.is_dir() else []
        return sorted(name for name in found if name not in _WORK_FILES and not name.startswith(("step-", ".")))

    def _check_work(self) -> None:
        """Make sure that a work folder without readable inputs is one all the same.

        Raises:
            OutputError: it holds something else, which the end of the stage would remove.
        """
        if foreign := self._foreign():
            raise OutputError(
                f"{self.work} holds {foreign[0]}, which no stage wrote",
                expected="no such folder, or that of an interrupted stage",
                fix="move it away, or choose another output folder",
            )

    def _check_inputs(self, before: dict[str, Any]) -> None:
        """Make sure that what was begun had these inputs, but for the budget."""
        if not differs_in_end(before, self.inputs):
            refuse_changes(self.work, before, self.inputs)

    def _keep_inputs(self, before: dict[str, Any] | None) -> None:
        """Write the inputs down, unless they are; what a checkpoint says of them counts more than a damaged file.

        Raises:
            TrainingError: the checkpoint was made from other inputs.
        """
        path, state = self.work / INPUTS, self.checkpoints.newest()
        self.extensions: list[dict[str, Any]] = []
        if state is not None:
            self._check_inputs(state["inputs"])
            self.extensions = [*state.get(HISTORY, []), *self._extended(state)]
        if self.accelerator.is_main_process and (before is None or changes(before, self.inputs)):
            if before is None and (path.is_file() or state is not None):
                say(f"{path} was damaged or missing; written anew")
            if before is not None:
                (self.work / fit.FILE).unlink(missing_ok=True)  # chosen for other inputs
            write_sealed(path, self.inputs)
        self.accelerator.wait_for_everyone()

    def _extended(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The note of another budget than the newest checkpoint's, if it is another.

        Raises:
            TrainingError: more tokens than it allows were trained on.
        """
        tokens = state["inputs"]["stage"]["tokens"]
        if tokens == self.stage.tokens:
            return []
        if self.schedule.steps < state["step"]:
            raise refuse_less(self.out, self.work, state["step"] * self.schedule.step_tokens, self.stage.tokens)
        extension = Extension(self.stage, tokens, state["step"])
        if self.accelerator.is_main_process:
            say(extension.line())
        return [extension.note()]

    def try_teacher(self) -> None:
        """Warn of a teacher that guesses, where nothing is trained yet."""
        if self.accelerator.is_main_process and self.checkpoints.newest() is None:
            provenance = read_provenance(self.checkpoint)
            if provenance is not None and provenance.stage in UNTRAINED:
                warn_of_guessing(self.recipe, source_view(self.files))
        self.accelerator.wait_for_everyone()

    def prepare(self) -> None:
        """Make the choices that are left to the machine, and the text ready."""
        saved = self.checkpoints.newest() or {}
        self._settle(self.fit.choose(read_sealed(self.work / fit.FILE) or saved.get("chosen")))
        if self.accelerator.is_main_process and (short := self.reader.crowding()) is not None:
            say(f"{self.stage.name}: {short}")
        self.reader.prepare()

    def train(self) -> tuple[Objective, StageReport]:
        """Train to the end; anew with other choices where the first step of this start shows that they do not work."""
        while True:
            self.log: MetricsLog | None = None
            try:
                return self._train()
            except fit.failures() as error:
                other = self.fit.otherwise(self.chosen, error)
                if other is None or (self.log is not None and self.log.written):
                    raise
                why = (str(error).splitlines() or [type(error).__name__])[0]
            self._retry(other, why)

    def _retry(self, other: Chosen, why: str) -> None:
        """Free everything and settle on other choices.

        Raises:
            HardwareError: several processes train, some of which may wait for this one.
        """
        if not self._alone:
            write_sealed(self.work / fit.FILE, dc.asdict(other))
            raise HardwareError(why, expected=other.line(), fix="start again: the stage goes on with these")
        say(f"{self.stage.name}: {why}")
        self.accelerator.free_memory()
        self._settle(other)

    @property
    def _alone(self) -> bool:
        return bool(self.accelerator.num_processes == 1)

    def _settle(self, chosen: Chosen) -> None:
        """Take these choices, and write them down."""
        self.chosen = chosen
        beside = {"inputs": self.inputs, "chosen": dc.asdict(chosen)}
        self.checkpoints.beside = beside | ({HISTORY: self.extensions} if self.extensions else {})
        self.stage, self.train_settings = chosen.applied(self.fit.stage, self.fit.train)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_sealed(self.work / fit.FILE, dc.asdict(chosen))
            if self.accelerator.device.type == "cuda":
                say(f"{self.stage.name}: {chosen.line()}")

    def _train(self) -> tuple[Objective, StageReport]:
        """Set up, restore if there is something to restore, and train to the end."""
        state = self.checkpoints.newest()
        objective = self._objective(None if state is None else state["memory"])
        torch.manual_seed(self.recipe.train.seed + self.accelerator.process_index)  # unless a checkpoint says otherwise
        now, position = Progress(), None
        if state is not None:
            now = Progress(**{field.name: state[field.name] for field in dc.fields(Progress) if field.name in state})
            if self.accelerator.is_main_process:
                say(f"{self.stage.name}: continuing at step {now.step} of {self.schedule.steps}")
            position = state["position"]
            self.checkpoints.load(objective.parts)
        monitors = self._monitors(objective, state or {})
        if self.accelerator.is_main_process:
            self.checkpoints.restore_log()
        log = self.log = MetricsLog(self.work, self.accelerator)
        try:
            with Background(self._steps(position)) as rows:
                now = train(objective, rows, self.stage, self.schedule, self.checkpoints, log, now, monitors)
        finally:
            objective.close()
        return objective, self._report(objective, now, monitors)

    def _monitors(self, objective: Objective, saved: dict[str, Any]) -> list[Monitor]:
        """What looks at each step, as a training checkpoint left it."""
        held_out = self._held_out(objective, saved.get(HeldOut.key))
        return [
            *([] if held_out is None else [held_out]),
            LeftOut(self.checkpoints, self.accelerator),
            RouterWatch(objective, saved.get(RouterWatch.key)),
            LateCompiling(aloud=self.accelerator.is_main_process),
        ]

    def _held_out(self, objective: Objective, memory: dict[str, Any] | None) -> HeldOut | None:
        """The looks at held-out text, None for none."""
        if (looks := Looks.of(self.recipe, self.stage)) is None:
            return None
        read = held_out_rows(self.recipe, self.stage, self.checkpoint, looks, self.accelerator)
        if not read:
            return None
        size = self.chosen.micro_batch
        return HeldOut(objective, looks, read, micro_batch=size, place=self.place, name=self.stage.name, memory=memory)

    def write(self, objective: Objective, report: StageReport) -> None:
        """Write the finished checkpoint under its own name."""
        state = objective.state_dict()
        if self.accelerator.is_main_process:
            with new_folder(self.out) as folder, writing(folder):
                objective.student.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_SIZE)
                copy_auxiliary_files(self.checkpoint, folder)
                if (provenance := read_provenance(self.checkpoint)) is not None:
                    dc.replace(provenance, stage=self.stage.name, shards={}).write(folder)
                if (self.work / metrics.FILE).is_file():
                    shutil.copyfile(self.work / metrics.FILE, folder / metrics.FILE)
                history = {HISTORY: self.extensions} if self.extensions else {}
                write_record(folder, self.inputs | history, report.to_dict())
                write_manifest(folder)
        self.accelerator.wait_for_everyone()

    def trim_work(self) -> None:
        """Leave of a finished stage's work what a larger budget goes on from: the last training checkpoint."""
        if self.accelerator.is_main_process:
            self.checkpoints.drop_others()
            (self.work / metrics.FILE).unlink(missing_ok=True)  # the checkpoint has it
        self.accelerator.wait_for_everyone()

    def say_where(self) -> None:
        """Say where an interrupted stage will go on."""
        if self.accelerator.is_main_process:
            state = self.checkpoints.newest() or {"step": 0}
            say(f"{self.stage.name}: {state['step']} of {self.schedule.steps} steps are saved in {self.work}")

    def with_price(self, error: DataError) -> DataError:
        """An error of the text with what mending it costs: a stage is never continued with other text."""
        step = self.checkpoints.step
        lost = f"the {step} steps in {self.work} are lost: delete it first" if step else "nothing is lost"
        fixes = [text for text in (error.fix, f"other text starts anew, {lost}") if text]
        return DataError(error.what, expected=error.expected, fix="; ".join(fixes))

    def _objective(self, memory: dict[str, Any] | None) -> Objective:
        torch.compiler.reset()  # or rows of another length than the last stage's would be compiled for any length
        model = load_student(self.checkpoint, self.match.sse, self.accelerator)
        layers = model.sse_layers().values()
        reason = next(filter(None, (layer.trains_on_torch(self.accelerator.device) for layer in layers)), None)
        if reason is not None and self.accelerator.is_main_process:
            say(f"{self.stage.name}: PyTorch makes the gradients, slowly: {reason}")
        stretch_rope(choose_attention(model, self.stage), self.stage)
        if self.stage.loss == "layer_mse":
            teacher = self._teacher()
            first = next(self._steps(None)).batches if memory is None else []
            return Align(self.accelerator, model, teacher, self.stage, first=first, memory=memory)
        student = Student.of(model, self.accelerator, self.stage, self.train_settings)
        if self.stage.loss == "ce":
            return Uptrain(self.accelerator, student, self.stage, self.train_settings)
        return Distill(self.accelerator, student, self._teacher(), self.stage, self.train_settings)

    def _teacher(self) -> PreTrainedModel:
        return choose_attention(load_teacher(self.recipe, self.accelerator), self.stage)

    def _steps(self, position: dict[str, Any] | None) -> Iterator[Step]:
        """The stage's steps from a position of its rows on."""
        left = self.schedule.steps * self.schedule.rows - (position["row"] if position else 0)
        return steps(
            islice(self.reader.rows(position), left),
            rows_per_step=self.schedule.rows,
            micro_batch=self.chosen.micro_batch,
            place=self.place,
        )

    def _report(self, objective: Objective, now: Progress, monitors: list[Monitor]) -> StageReport:
        records = metrics.read(self.work / metrics.FILE)
        losses = objective.curve(records)
        tail = losses[-AVERAGED:]
        state = self.checkpoints.newest() or {"position": {"sources": []}}
        return StageReport(
            name=self.stage.name,
            loss=self.stage.loss,
            out=str(self.out),
            steps=now.step,
            tokens=now.step * self.schedule.step_tokens,
            skipped_steps=now.skipped,
            loss_first=losses[0] if losses else None,
            loss_last=sum(tail) / len(tail) if tail else None,
            seconds=sum(record["seconds"] for record in records),
            text_passes=[cursor[0] for cursor in state["position"]["sources"]],
            details=objective.details(records),
            rose=rises(losses),
            chosen=dc.asdict(self.chosen),
            extended=self.extensions,
            **{name: found for monitor in monitors for name, found in monitor.report(records).items()},
        )
