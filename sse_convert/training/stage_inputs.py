"""What a stage is checked for before anything is loaded, and everything that decides what it computes."""

import dataclasses as dc
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.data.rows import RowReader
from sse_convert.data.teacher_samples import SamplingTeacher
from sse_convert.modeling.auto import register
from sse_convert.recipe.schema import Needles, Recipe, Stage
from sse_convert.report import json_ready
from sse_convert.surgery.compatibility import Match
from sse_convert.surgery.positions import check_row_length, position_limit, stretch
from sse_convert.training.schedule import Schedule
from sse_convert.trust import trusts_code

_FREE = ("name", "micro_batch", "gradient_checkpointing", "context_parallel", "checkpoint_steps")
"""stage keys that do not decide what is computed, so they may change between interruption and continuation"""


def check_stage(recipe: Recipe, stage: Stage, accelerator: Accelerator) -> None:
    """What can be found wrong with a stage before anything is loaded.

    Raises:
        TrainingError: rows and processes do not go together.
    """
    Schedule.of(stage).check_processes(accelerator.num_processes // stage.context_parallel)


def stage_inputs(recipe: Recipe, stage: Stage, checkpoint: Path, reader: RowReader, match: Match) -> dict[str, Any]:
    """Everything that decides what a stage computes, as nested JSON-ready data under recipe-like keys."""
    settings = {key: value for key, value in dc.asdict(stage).items() if key not in _FREE}
    train = dc.asdict(recipe.train)
    deciding = ("mixed_precision", "compile", "seed", *(["lora_rank"] if stage.train == "lora" else []))
    inputs: dict[str, Any] = {
        "checkpoint": checkpoint_identity(checkpoint),
        "stage": settings,
        "train": {key: train[key] for key in deciding},
        "data": _row_settings(recipe, stage),
        "text": reader.fingerprint(),
    }
    if match.training:
        inputs["mixers"] = match.training
    if stage.loss != "ce":
        inputs["model"] = checkpoint_identity(recipe.model, recipe.revision)
    ready: dict[str, Any] = json_ready(inputs)
    return ready


def _needles(recipe: Recipe, stage: Stage) -> Needles:
    """What to plant: `data.needles`; only kl stages take answers."""
    needles = recipe.data.needles
    return needles if stage.loss == "kl" else dc.replace(needles, answers="teacher")


def _row_settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """What decides the stage's rows beside their text and length, JSON-ready."""
    data = dc.asdict(dc.replace(recipe.data, needles=_needles(recipe, stage)))
    return {key: data[key] for key in ("train", "needles", "seed")}


def stage_reader(recipe: Recipe, stage: Stage, checkpoint: Path) -> RowReader:
    """The training rows of a stage.

    Raises:
        RecipeError: rows are longer than the model's context, or its family refuses the stage's rope.
        DataError: the text cannot be used.
    """
    config = open_checkpoint(checkpoint).config
    limit = position_limit(config)
    if stage.rope is not None:
        limit = position_limit(_stretched_config(checkpoint, stage))
    check_row_length(stage, limit)
    if stage.loss != "ce":  # an earlier stage may have stretched the student
        check_row_length(stage, position_limit(open_checkpoint(recipe.model, recipe.revision).config))
    return RowReader(
        recipe.data.train,
        load_tokenizer(checkpoint),
        stage.seq_len,
        recipe.data.seed,
        needles=_needles(recipe, stage),
        loss_mask=stage.loss_mask,
        teacher=SamplingTeacher(recipe.model, recipe.revision),
        vocab_size=config.get("vocab_size"),
    )


def _stretched_config(checkpoint: Path, stage: Stage) -> Any:
    """The configuration a stage's `rope` makes of a converted checkpoint's, refused where its family refuses it."""
    from transformers import AutoConfig

    register()
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trusts_code())
    stretch(config, stage)
    return config
