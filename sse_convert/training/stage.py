"""One training stage as a command: checkpoint in, checkpoint out, resumed where it stopped.

It is settled, then trained, then written. While it runs, everything lives in `<out>.work`. The finished checkpoint
appears under its own name at once, with the metrics and a stage.json that says what it was made from. The last training
checkpoint stays in `<out>.work`: a larger budget goes on from there.
"""

import dataclasses as dc
import shutil
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files
from sse_convert.checkpoints.identity import STAGE_FILE, write_sealed
from sse_convert.checkpoints.manifest import write_manifest
from sse_convert.checkpoints.output_folder import new_folder
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.console import say
from sse_convert.errors import DataError, RecipeError
from sse_convert.process_memory import memory_for
from sse_convert.recipe.schema import Loss, Recipe, Stage
from sse_convert.surgery.guessing_teacher import warn_of_guessing_copy
from sse_convert.surgery.job import Job
from sse_convert.training import metrics
from sse_convert.training.attempt import train_stage
from sse_convert.training.checkpoint import writing
from sse_convert.training.objective import Objective
from sse_convert.training.stage_job import StageJob, settle
from sse_convert.training.stage_record import record_of
from sse_convert.training.stage_report import StageReport
from sse_convert.training.work_folder import WorkFolder

SHARD_SIZE = "5GB"


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
    job: Job,
    stage: Stage,
    checkpoint: str | Path,
    out: Path,
    accelerator: Accelerator,
    *,
    later: Sequence[Path] = (),
    try_teacher: bool = False,
) -> StageReport:
    """Run one stage, continue it, also to a larger budget, or report that it is finished.

    Args:
        job: model, layers, data and train of the recipe are read beside the stage.
        stage: what to do.
        checkpoint: a converted checkpoint.
        out: the folder to make.
        accelerator: of this process (`setup.make_accelerator`).
        later: what was made from it, in order; set aside where the budget of a finished stage has changed.
        try_teacher: warn of one that guesses, where nothing is trained yet.

    Raises:
        TrainingError: an earlier run in `out` had other inputs, more tokens or goes on, the settings do not fit the
            processes, or training does not stay finite.
        DataError: the text cannot be used.
        CheckpointError: a checkpoint cannot be loaded, or is not converted.
        RecipeError: the checkpoint has other layers than the recipe, or rows are longer than the model's context.
        OutputError: `out` exists and is no finished stage, or cannot be written.
        HardwareError: a parallel mode, backend or precision is not offered.
    """
    ready = settle(job, stage, checkpoint, Path(out), accelerator)
    work = WorkFolder(ready, later)
    if (done := work.finished()) is not None:
        return done
    with memory_for(f"training {out}"), work.opened() as chosen:
        if try_teacher and ready.leads and work.checkpoints.newest() is None:
            warn_of_guessing_copy(job.recipe, ready.files)
        accelerator.wait_for_everyone()
        if ready.leads and (short := ready.reader.crowding()) is not None:
            say(f"{stage.name}: {short}")
        ready.reader.prepare()
        try:
            objective, report = train_stage(ready, work, chosen)
            _write(ready, work, objective, report)
        except KeyboardInterrupt:
            work.say_where()
            raise
        except DataError as error:
            raise work.with_price(error) from error
    work.trim()
    accelerator.free_memory()
    return report


def _write(ready: StageJob, work: WorkFolder, objective: Objective, report: StageReport) -> None:
    """Write the finished checkpoint under its own name."""
    state, record = objective.state_dict(), record_of(ready.inputs | work.history, report.to_dict())
    if ready.leads:
        with new_folder(ready.out) as folder, writing(folder):
            objective.student.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_SIZE)
            copy_auxiliary_files(ready.files.folder, folder)
            if (provenance := read_provenance(ready.files.folder)) is not None:
                dc.replace(provenance, stage=ready.stage.name, shards={}).write(folder)
            if (work.path / metrics.FILE).is_file():
                shutil.copyfile(work.path / metrics.FILE, folder / metrics.FILE)
            write_sealed(folder / STAGE_FILE, record)
            write_manifest(folder)
    ready.accelerator.wait_for_everyone()
