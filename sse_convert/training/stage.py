"""One training stage as a command: checkpoint in, checkpoint out, resumed where it stopped.

While it runs, everything lives in `<out>.work` (inputs.json, metrics.jsonl, training checkpoints, trackers' files).
The finished checkpoint appears under its own name at once, with the metrics and a stage.json that says what it was
made from.
"""

import dataclasses as dc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from sse_convert.console import say
from sse_convert.errors import RecipeError, TrainingError
from sse_convert.evaluation.loading import load_tokenizer
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.report import json_ready
from sse_convert.surgery.checkpoint import open_checkpoint
from sse_convert.surgery.companions import copy_companions
from sse_convert.surgery.output import check_output, new_folder
from sse_convert.surgery.provenance import read_provenance
from sse_convert.training import metrics
from sse_convert.training.align import Align
from sse_convert.training.checkpoint import Checkpoints, writing
from sse_convert.training.data.feed import Background, Step, steps
from sse_convert.training.data.rows import RowReader
from sse_convert.training.data.teacher import Teacher
from sse_convert.training.distill import Distill
from sse_convert.training.loop import Progress, train
from sse_convert.training.metrics import MetricsLog
from sse_convert.training.objective import Objective
from sse_convert.training.record import checkpoint_identity, finished, refuse_changes, write_record
from sse_convert.training.report import AVERAGED, StageReport
from sse_convert.training.schedule import Schedule
from sse_convert.training.setup import load_student, load_teacher, make_accelerator
from sse_convert.training.uptrain import Uptrain

Loss = Literal["layer_mse", "kl", "ce"]
INPUTS = "inputs.json"
TRACKERS = "trackers"
SHARD_SIZE = "5GB"
_FREE = ("name", "micro_batch", "gradient_checkpointing", "checkpoint_steps")
"""stage keys that do not decide what is computed, so they may change between interruption and continuation"""


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


def run_stage(recipe: Recipe, stage: Stage, checkpoint: Path, out: Path) -> StageReport:
    """Run one stage, continue it, or report that it is finished.

    Args:
        recipe: model, data and train are read beside the stage.
        stage: what to do.
        checkpoint: a converted checkpoint.
        out: the folder to make.

    Raises:
        TrainingError: an earlier run in `out` had other inputs, the settings do not fit the processes, or training
            does not stay finite.
        DataError: the text cannot be used.
        CheckpointError: a checkpoint cannot be loaded.
        RecipeError: rows are longer than the model's context.
        OutputError: `out` exists and is no finished stage, or cannot be written.
        HardwareError: a parallel mode, backend or precision is not offered.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    work = out.with_name(f"{out.name}.work")
    accelerator = make_accelerator(recipe.train, work / TRACKERS)
    check_stage(recipe, stage, accelerator)
    reader = _reader(recipe, stage, checkpoint)
    inputs = stage_inputs(recipe, stage, checkpoint, reader)
    if (done := finished(out, inputs)) is not None:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)  # a killed process may not have come to it
        return dc.replace(StageReport(**done), already_done=True)
    _open_work(work, out, inputs, accelerator)
    reader.prepare()
    run = _Run(recipe, stage, checkpoint, out, work, accelerator, reader, Checkpoints(work, accelerator))
    try:
        objective, report = run.train()
        run.write(objective, inputs, report)
    except KeyboardInterrupt:
        if accelerator.is_main_process:
            saved = (run.checkpoints.newest() or {"step": 0})["step"]
            say(f"{stage.name}: {saved} of {run.schedule.steps} steps are saved in {work}")
        raise
    accelerator.free_memory()
    return report


@dc.dataclass(frozen=True, slots=True)
class _Run:
    """A stage in progress."""

    recipe: Recipe
    stage: Stage
    checkpoint: Path
    out: Path
    work: Path
    accelerator: Accelerator
    reader: RowReader
    checkpoints: Checkpoints

    @property
    def schedule(self) -> Schedule:
        return Schedule.of(self.stage)

    def train(self) -> tuple[Objective, StageReport]:
        """Set up, restore if there is something to restore, and train to the end."""
        state = self.checkpoints.newest()
        objective = self._objective(None if state is None else state["memory"])
        now = Progress()
        torch.manual_seed(self.recipe.train.seed + self.accelerator.process_index)
        if state is not None and objective.parts:
            self.checkpoints.load(objective.parts)
            now = Progress(state["step"], state["skipped"], state["bad_in_a_row"])
        if objective.parts:
            now = self._loop(objective, now, None if state is None else state["position"])
        return objective, self._report(objective, now)

    def write(self, objective: Objective, inputs: dict[str, Any], report: StageReport) -> None:
        """Write the finished checkpoint under its own name, then drop the work folder."""
        state = objective.state_dict()
        if self.accelerator.is_main_process:
            with new_folder(self.out) as folder, writing(folder):
                objective.student.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_SIZE)
                copy_companions(self.checkpoint, folder)
                if (provenance := read_provenance(self.checkpoint)) is not None:
                    dc.replace(provenance, stage=self.stage.name, shards={}).write(folder)
                if (self.work / metrics.FILE).is_file():
                    shutil.copyfile(self.work / metrics.FILE, folder / metrics.FILE)
                if (self.work / TRACKERS).is_dir():
                    shutil.copytree(self.work / TRACKERS, folder / TRACKERS)
                write_record(folder, inputs, report.to_dict())
            shutil.rmtree(self.work)
        self.accelerator.wait_for_everyone()

    def _objective(self, memory: dict[str, Any] | None) -> Objective:
        student = load_student(self.checkpoint, self.recipe.train.backend)
        if self.stage.loss == "ce":
            return Uptrain(self.accelerator, student, self.stage, self.recipe.train)
        teacher = load_teacher(self.recipe, self.accelerator)
        if self.stage.loss == "kl":
            return Distill(self.accelerator, student, teacher, self.stage, self.recipe.train)
        first = next(self._steps(None)).batches if memory is None else []
        return Align(self.accelerator, student, teacher, self.stage, first=first, memory=memory)

    def _steps(self, position: dict[str, Any] | None) -> Iterator[Step]:
        return steps(
            self.reader.rows(position),
            rows_per_step=self.schedule.rows,
            micro_batch=self.stage.micro_batch,
            rank=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )

    def _loop(self, objective: Objective, now: Progress, position: dict[str, Any] | None) -> Progress:
        settings = {key: str(value) for key, value in dc.asdict(self.stage).items()}
        self.accelerator.init_trackers("sse-convert", config=settings)
        log = MetricsLog(self.work, self.accelerator, now.step)
        try:
            with Background(self._steps(position)) as rows:
                return train(objective, rows, self.stage, self.schedule, self.checkpoints, log, now)
        finally:
            log.close()

    def _report(self, objective: Objective, now: Progress) -> StageReport:
        records = metrics.read(self.work / metrics.FILE)
        losses = [record["loss"] for record in records if record["loss"] is not None]
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
        )


def check_stage(recipe: Recipe, stage: Stage, accelerator: Accelerator) -> None:
    """What can be found wrong with a stage before anything is loaded.

    Raises:
        TrainingError: rows and processes do not go together, or a precision does not go with the loss.
    """
    Schedule.of(stage).check_processes(accelerator.num_processes)
    if stage.loss == "layer_mse" and accelerator.mixed_precision == "fp16":
        raise TrainingError(
            f"stage {stage.name}: loss layer_mse with mixed_precision fp16",
            expected="bf16 or no",
            fix="set train.mixed_precision to bf16, or to no on hardware without it",
        )


def stage_inputs(recipe: Recipe, stage: Stage, checkpoint: Path, reader: RowReader) -> dict[str, Any]:
    """Everything that decides what a stage computes, as nested JSON-ready data under recipe-like keys."""
    settings = {key: value for key, value in dc.asdict(stage).items() if key not in _FREE}
    train, data = dc.asdict(recipe.train), dc.asdict(recipe.data)
    deciding = ("mixed_precision", "backend", "seed", *(["lora"] if stage.train == "lora" else []))
    inputs = {
        "checkpoint": checkpoint_identity(checkpoint),
        "stage": settings,
        "train": {key: train[key] for key in deciding},
        "data": {key: data[key] for key in ("train", "needles", "seed")},
        "text": reader.fingerprint(),
    }
    if stage.loss != "ce":
        inputs["model"] = checkpoint_identity(recipe.model, recipe.revision)
    return inputs


def _reader(recipe: Recipe, stage: Stage, checkpoint: Path) -> RowReader:
    config = open_checkpoint(checkpoint).config
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if limit is not None and stage.seq_len > limit:
        raise RecipeError(
            f"stage {stage.name}: seq_len is {stage.seq_len}, the model has {limit} positions",
            expected=f"at most {limit}",
            fix="lower seq_len",
        )
    return RowReader(
        recipe.data.train,
        load_tokenizer(checkpoint),
        stage.seq_len,
        recipe.data.seed,
        needles=recipe.data.needles,
        loss_mask=stage.loss_mask,
        teacher=Teacher(recipe.model, recipe.revision),
        vocab_size=config.get("vocab_size"),
    )


def _open_work(work: Path, out: Path, inputs: dict[str, Any], accelerator: Accelerator) -> None:
    """Make the work folder, or check that it belongs to these inputs."""
    path = work / INPUTS
    if path.is_file():
        refuse_changes(work, json.loads(path.read_text(encoding="utf-8")), inputs)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not path.is_file():
        check_output(out)
        work.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(json_ready(inputs), indent=2), encoding="utf-8")
        unfinished.replace(path)
    accelerator.wait_for_everyone()
