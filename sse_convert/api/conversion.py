"""From a model to a hybrid: what would happen, which layers, the new checkpoint and its first values."""

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sse_convert.api.recipes import RecipeLike, job_of, read_recipe, shell_command
from sse_convert.console import progress
from sse_convert.recipe import Recipe
from sse_convert.recipe.choosing import is_open
from sse_convert.recipe.loader import recipe_or_model

if TYPE_CHECKING:
    from sse_convert.calibration.calibrate import CalibrateReport
    from sse_convert.selection.selection_report import SelectReport
    from sse_convert.surgery.convert import ConvertReport
    from sse_convert.surgery.dequantize import DequantizeReport
    from sse_convert.surgery.plan_report import Plan


def plan(recipe: RecipeLike, *, overrides: Sequence[str] | None = None) -> "Plan":
    """What a recipe does to its model, and what it costs: layers, memory, GPU hours.

    Of a model it reads configs and headers only; local text of up to 64 MiB it reads as `run` would, for its warnings.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        overrides: `a.b=c` assignments (for a file or a name).

    Raises:
        RecipeError: the recipe is malformed or does not fit the model.
        CheckpointError, HubError: the model cannot be read.
    """
    command = shell_command(recipe, overrides)
    recipe = read_recipe(recipe, overrides)
    from sse_convert.checkpoints.config_only import open_for_planning
    from sse_convert.surgery.cpu_speed import cpu_alone
    from sse_convert.surgery.job import Job
    from sse_convert.surgery.plan import make_plan
    from sse_convert.surgery.text_notes import text_notes

    made = make_plan(Job.of(recipe, open_for_planning), cpu=cpu_alone())
    return dc.replace(made, command=command, notes=[*made.notes, *text_notes(recipe.data)])


def select(
    source: RecipeLike,
    keep: int | None = None,
    out: Path | str = "out/select",
    *,
    text: Path | str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    samples: int | None = None,
    device: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "SelectReport":
    """Choose which layers stay softmax attention, before any training. What is not given is as `run` would take it from
    the recipe.

    Args:
        source: a recipe, a recipe file, the name of a packaged recipe, or the folder or hub id of a model.
        keep: layers to keep; unset: as many as the recipe's `layers.select` says.
        out: folder for scores, the recipe fragment and the report; an interrupted run is continued.
        text: file or folder to use in place of the recipe's `data.train`.
        tokens: running text to predict; unset: 8,192 or one row.
        length: tokens per row; unset: those of the recipe's longest rows, 1,024 to 4,096. Where that would take a CPU
            more than a few minutes: 1,024, with half of the text and of the samples, and layers are ranked by one pass
            over attention instead of greedily.
        samples: needle (or copy) rows; unset: 16.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.
        overrides: `a.b=c` assignments (for a file, a name or a model).

    Raises:
        UsageError: a setting is out of range, or needs what the model has not; or heads are chosen, and the model
            recalls nothing.
        RecipeError: the recipe is malformed.
        TrainingError: `out` was made from other inputs.
        DataError, CheckpointError, HubError, HardwareError, OutputError: text, model, machine or folder do not do.
    """
    with progress("opening the model", 1):
        recipe = source if isinstance(source, Recipe) else recipe_or_model(source, list(overrides or ()))
        from sse_convert.selection.from_recipe import settings_for
        from sse_convert.selection.select import select_layers
        from sse_convert.surgery.job import Job

        job, settings = settings_for(
            Job.of(recipe), keep=keep, tokens=tokens, length=length, samples=samples, device=device
        )
    own = None if text is None else Path(text)
    return select_layers(job, Path(out), settings, text=own, device=device, try_teacher=True)


def convert(
    recipe: RecipeLike,
    out: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    link: Literal["auto", "hard", "copy"] = "auto",
    check: bool = False,
    defer_digests: bool = False,
) -> "ConvertReport":
    """Make the hybrid checkpoint: the teacher's shards copied or linked, one shard of new tensors, config, code.

    Where the recipe has `layers.select`, layers are chosen first, into `OUT.select`; a killed choice is continued.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        out: the folder to make.
        overrides: `a.b=c` assignments (for a file or a name).
        link: auto hard-links shards of the hub cache and copies others (without room, where the file system can); hard
            links wherever it can, so that an edit of the result changes the teacher; copy links nothing.
        check: stream every shard first: NaN, Inf.
        defer_digests: do not read the teacher's shards for their SHA-256; manifest.json says which ones lack it.

    Raises:
        RecipeError: the recipe is malformed or does not fit the model.
        CheckpointError, HubError: the teacher cannot be read or converted, or `check` found NaN or Inf.
        OutputError: `out` exists or cannot be written, or the disk is full; nothing is left behind.
    """
    recipe, out = read_recipe(recipe, overrides), Path(out)
    from sse_convert.checkpoints.output_folder import check_output
    from sse_convert.surgery.convert import convert_checkpoint
    from sse_convert.surgery.job import Job

    check_output(out)
    chosen, job = is_open(recipe), Job.of(recipe)
    if chosen:
        from sse_convert.selection.automatic import choose_for_conversion

        job = choose_for_conversion(job, out)
    return convert_checkpoint(job, out, link=link, check=check, defer_digests=defer_digests, try_teacher=not chosen)


def calibrate(
    recipe: RecipeLike, checkpoint: Path | str, out: Path | str, *, overrides: Sequence[str] | None = None
) -> "CalibrateReport":
    """Set the new tensors of a converted checkpoint from teacher statistics.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted checkpoint.
        out: the folder to make.
        overrides: `a.b=c` assignments (for a file or a name).

    Raises:
        RecipeError: the recipe is malformed, gives the model other layers than the checkpoint has, or rows that are too
            long, or too short for what a window misses.
        CheckpointError: a checkpoint cannot be loaded, or is not a converted, untrained one.
        DataError: the text cannot be used.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    job = job_of(checkpoint, recipe, overrides)
    from sse_convert.calibration.calibrate import calibrate_checkpoint

    return calibrate_checkpoint(job, Path(checkpoint), Path(out), try_teacher=True)


def dequantize(model: Path | str, out: Path | str, *, revision: str | None = None) -> "DequantizeReport":
    """Make a bfloat16 copy of a model whose weights are quantised (fp8, mxfp4 or GGUF), which can be converted.

    Weights are read and written one by one: memory does not grow with the model. A GGUF file is read whole instead, by
    transformers with the package gguf: six bytes for each parameter.

    Args:
        model: folder, hub id or GGUF file.
        out: the folder to make.
        revision: hub branch, tag or commit.

    Raises:
        CheckpointError, HubError: the model cannot be read, is not quantised, or is so in another way.
        OutputError: `out` exists or cannot be written, or the disk is full; nothing is left behind.
    """
    from sse_convert.surgery.dequantize import dequantize_checkpoint

    return dequantize_checkpoint(model, Path(out), revision=revision)
