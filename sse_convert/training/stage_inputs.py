"""What a stage is checked for before anything is loaded, and everything that decides what it computes."""

import dataclasses as dc
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.teacher import Teacher, open_teacher, source_view
from sse_convert.checkpoints.vocabulary import check_same_tokens
from sse_convert.data.rows import RowReader, text_digests
from sse_convert.data.teacher_samples import SamplingTeacher
from sse_convert.errors import TrainingError
from sse_convert.modeling.auto import register
from sse_convert.recipe.schema import Needles, Recipe, Stage
from sse_convert.recipe.stage_teacher import stage_teacher
from sse_convert.surgery.compatibility import Match
from sse_convert.surgery.positions import check_row_length, position_limit, stretch
from sse_convert.surgery.stage_teachers import check_reads
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_record import KEEP
from sse_convert.trust import trusts_code

_FREE = ("name", "micro_batch", "gradient_checkpointing", "context_parallel", "checkpoint_steps", "needle_keys")
"""stage keys that do not decide what is computed, so they may change between interruption and continuation;
`needle_keys` decides as a part of `data.needles`"""


def check_stage(recipe: Recipe, stage: Stage, accelerator: Accelerator) -> None:
    """What can be found wrong with a stage before anything is loaded.

    Raises:
        TrainingError: rows and processes do not go together, or a precision does not go with the loss.
    """
    Schedule.of(stage).check_processes(accelerator.num_processes // stage.context_parallel)
    if stage.loss == "layer_mse" and accelerator.mixed_precision == "fp16":
        raise TrainingError(
            f"stage {stage.name}: loss layer_mse with mixed_precision fp16",
            expected="bf16 or no",
            fix="set train.mixed_precision to bf16, or to no on hardware without it",
        )


def stage_inputs(recipe: Recipe, stage: Stage, checkpoint: Path, reader: RowReader, match: Match) -> dict[str, Any]:
    """Everything that decides what a stage computes, as nested JSON-ready data under recipe-like keys."""
    settings = {key: value for key, value in dc.asdict(stage).items() if key not in (*_FREE, "teacher")}
    train = dc.asdict(recipe.train)
    deciding = ("mixed_precision", "compile", "seed", *(["lora"] if stage.train == "lora" else []))
    inputs: dict[str, Any] = {
        "checkpoint": checkpoint_identity(checkpoint),
        "stage": settings,
        "train": {key: train[key] for key in deciding},
        "data": _row_settings(recipe, stage),
        "text": reader.fingerprint(),
    }
    if recipe.train.keep == "best":
        valid = [dc.asdict(source) for source in recipe.data.valid]
        every = recipe.train.validate_every
        inputs[KEEP] = {"every": every, "valid": valid, "text": text_digests(recipe.data.valid)}
    if match.training:
        inputs["mixers"] = match.training
    if stage.loss != "ce":
        inputs |= _teacher_identity(recipe, stage)
    return inputs


def _teacher_identity(recipe: Recipe, stage: Stage) -> dict[str, str]:
    """What tells the teacher of a stage apart: the recipe's `model`, or the stage's own `teacher`."""
    source = stage_teacher(recipe, stage)
    return {"model" if stage.teacher is None else "teacher": checkpoint_identity(source.name, source.revision)}


def _needles(recipe: Recipe, stage: Stage) -> Needles:
    """What to plant: `data.needles`, with as many in a row as the stage asks for; only kl stages take answers."""
    needles = recipe.data.needles
    answers = needles.answers if stage.loss == "kl" else "teacher"
    return dc.replace(needles, keys=stage.needle_keys or needles.keys, answers=answers)


def _row_settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """What decides the stage's rows beside their text and length, JSON-ready."""
    data = dc.asdict(dc.replace(recipe.data, needles=_needles(recipe, stage)))
    return {key: data[key] for key in ("train", "needles", "seed")}


def other_teacher(recipe: Recipe, stage: Stage, checkpoint: CheckpointFiles) -> Teacher | None:
    """The model that a stage learns from in place of the recipe's, opened; None for the recipe's.

    Raises:
        RecipeError: it has other tokens than the checkpoint, or cannot read the stage's rows.
        CheckpointError: it cannot be opened, or is of no known family, quantised or converted.
        HubError: the hub refused or cannot be reached.
    """
    if stage.teacher is None:
        return None
    source = stage_teacher(recipe, stage)
    teacher = open_teacher(source.name, source.revision)
    check_reads(stage, teacher)
    check_same_tokens(checkpoint, teacher.files, stage.name)
    return teacher


def common_vocabulary(checkpoint: CheckpointFiles, teacher: Teacher | None) -> int | None:
    """Tokens that the embeddings of a converted checkpoint and another teacher have both; None without one."""
    return None if teacher is None else min(source_view(checkpoint).text.vocab_size, teacher.text.vocab_size)


def stage_reader(recipe: Recipe, stage: Stage, checkpoint: Path, vocabulary: int | None = None) -> RowReader:
    """The training rows of a stage. `vocabulary`: tokens that all its models embed; None means the checkpoint's.

    Raises:
        RecipeError: rows are longer than the model's context, or its family refuses the stage's rope.
        DataError: the text cannot be used.
    """
    config = open_checkpoint(checkpoint).config
    limit = position_limit(config)
    if stage.rope is not None:
        limit = position_limit(_stretched_config(checkpoint, stage))
    check_row_length(stage, limit)
    if stage.loss != "ce" and stage.teacher is None:  # an earlier stage may have stretched the student
        check_row_length(stage, position_limit(open_checkpoint(recipe.model, recipe.revision).config))
    return RowReader(
        recipe.data.train,
        load_tokenizer(checkpoint),
        stage.seq_len,
        recipe.data.seed,
        needles=_needles(recipe, stage),
        loss_mask=stage.loss_mask,
        teacher=SamplingTeacher(recipe.model, recipe.revision),
        vocab_size=vocabulary or config.get("vocab_size"),
    )


def _stretched_config(checkpoint: Path, stage: Stage) -> Any:
    """The configuration a stage's `rope` makes of a converted checkpoint's, refused where its family refuses it."""
    from transformers import AutoConfig

    register()
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trusts_code())
    stretch(config, stage)
    return config
