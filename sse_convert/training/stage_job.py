"""A stage with all that it needs, settled and checked before anything is loaded."""

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import tokenizer_of
from sse_convert.checkpoints.open import CheckpointFiles, download, whole_checkpoint
from sse_convert.checkpoints.teacher import config_object, refuse_quantised
from sse_convert.data.rows import RowReader
from sse_convert.modeling.auto import register
from sse_convert.recipe.schema import Needles, Stage, Train
from sse_convert.report import json_ready
from sse_convert.surgery.compatibility import Match, match_recipe
from sse_convert.surgery.job import Job
from sse_convert.surgery.positions import check_row_length, position_limit, stretch
from sse_convert.training.context import Place, lay_out
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_record import FREE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """A stage about to begin."""

    job: Job
    stage: Stage
    accelerator: Accelerator
    place: Place
    """of this process"""
    schedule: Schedule
    files: CheckpointFiles
    """the converted checkpoint"""
    match: Match
    """its layers"""
    tokenizer: "PreTrainedTokenizerBase"
    reader: RowReader
    """training rows"""
    inputs: dict[str, Any]
    """everything that decides what is computed; JSON data under recipe-like keys"""
    out: Path
    """the folder to make"""

    @property
    def train(self) -> Train:
        """The recipe's settings for all stages."""
        return self.job.recipe.train

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks."""
        return bool(self.accelerator.is_main_process)

    @property
    def alone(self) -> bool:
        """Whether no other process trains."""
        return bool(self.accelerator.num_processes == 1)


def settle(job: Job, stage: Stage, checkpoint: str | Path, out: Path, accelerator: Accelerator) -> StageJob:
    """Open the checkpoint and the text, and check all that can be checked before anything is loaded.

    Args, Raises: see `stage.run_stage`.
    """
    recipe = job.recipe
    place = lay_out(accelerator, stage)
    schedule = Schedule.of(stage)
    schedule.check_processes(place.ranks)
    files = whole_checkpoint(checkpoint)
    refuse_quantised(files)
    needles = recipe.data.needles  # only kl stages take answers
    needles = needles if stage.loss == "kl" else dc.replace(needles, answers="teacher")
    inputs = _inputs(job, stage, files, needles)
    _check_positions(job, stage, files)
    match = match_recipe(recipe, files)
    files = download(files)
    tokenizer = tokenizer_of(files)
    reader = RowReader(
        recipe.data.train,
        tokenizer,
        stage.seq_len,
        recipe.data.seed,
        order=recipe.train.seed,
        needles=needles,
        loss_mask=stage.loss_mask,
        teacher=job.sampler,
        vocab_size=files.config.get("vocab_size"),
    )
    found = {"text": reader.fingerprint(), **({"mixers": match.training} if match.training else {})}
    return StageJob(
        job=job,
        stage=stage,
        accelerator=accelerator,
        place=place,
        schedule=schedule,
        files=files,
        match=match,
        tokenizer=tokenizer,
        reader=reader,
        inputs=json_ready(inputs | found),
        out=out,
    )


def _check_positions(job: Job, stage: Stage, files: CheckpointFiles) -> None:
    """Make sure that rows are no longer than the models' contexts, and that the family takes the stage's rope.

    Raises:
        RecipeError: they are, or it does not.
    """
    config: Any = files.config
    if stage.rope is not None:
        register()
        config = config_object(config)
        stretch(config, stage)
    check_row_length(stage, position_limit(config))
    if stage.loss != "ce":  # an earlier stage may have stretched the student
        check_row_length(stage, position_limit(job.teacher().files.config))


def _inputs(job: Job, stage: Stage, files: CheckpointFiles, needles: Needles) -> dict[str, Any]:
    """What decides what is computed, beside the text, and settings in which the checkpoint differs."""
    train, data = dc.asdict(job.recipe.train), dc.asdict(job.recipe.data)
    free = FREE["train"] if stage.train == "lora" else (*FREE["train"], "lora_rank")
    inputs: dict[str, Any] = {
        "checkpoint": checkpoint_identity(files.name),
        "stage": {key: value for key, value in dc.asdict(stage).items() if key not in FREE["stage"]},
        "train": {key: value for key, value in train.items() if key not in free},
        "data": {"train": data["train"], "needles": dc.asdict(needles), "seed": data["seed"]},
    }
    if stage.loss != "ce":
        inputs["model"] = job.identity
    return inputs
