"""A hybrid learns and is measured: the stages of a recipe, one by one or all, and evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sse_convert.api.recipes import RecipeLike, job_of, read_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.loader import problems_error
from sse_convert.recipe.schema import Loss

if TYPE_CHECKING:
    from sse_convert.evaluation.report import EvalReport
    from sse_convert.pipeline import RunReport
    from sse_convert.training.stage_report import StageReport


def align(
    recipe: RecipeLike,
    checkpoint: Path | str,
    out: Path | str,
    *,
    stage: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "StageReport":
    """Run the recipe's stage with loss layer_mse: each converted layer learns to give its teacher layer's output.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted checkpoint to start from.
        out: the folder to make; an interrupted run of the same stage is continued.
        stage: stage name, where the recipe has several of this loss.
        overrides: `a.b=c` assignments (for a file or a name).

    Raises:
        RecipeError: the recipe is malformed, or has no such stage.
        TrainingError: an earlier run in `out` had other inputs, or training does not stay finite.
        DataError, CheckpointError, OutputError, HardwareError: text, checkpoint, folder or machine do not do.
    """
    return _stage(recipe, "layer_mse", checkpoint, out, stage, overrides)


def distill(
    recipe: RecipeLike,
    checkpoint: Path | str,
    out: Path | str,
    *,
    stage: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "StageReport":
    """Run the recipe's stage with loss kl: the model learns the teacher's predictions.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted checkpoint to start from.
        out: the folder to make; an interrupted run of the same stage is continued.
        stage: stage name, where the recipe has several of this loss.
        overrides: `a.b=c` assignments (for a file or a name).

    Raises:
        SSEConvertError: as `align`.
    """
    return _stage(recipe, "kl", checkpoint, out, stage, overrides)


def uptrain(
    recipe: RecipeLike,
    checkpoint: Path | str,
    out: Path | str,
    *,
    stage: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "StageReport":
    """Run the recipe's stage with loss ce: the model learns the text, or chat answers.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted checkpoint to start from.
        out: the folder to make; an interrupted run of the same stage is continued.
        stage: stage name, where the recipe has several of this loss.
        overrides: `a.b=c` assignments (for a file or a name).

    Raises:
        SSEConvertError: as `align`.
    """
    return _stage(recipe, "ce", checkpoint, out, stage, overrides)


def _stage(
    recipe: RecipeLike,
    loss: Loss,
    checkpoint: Path | str,
    out: Path | str,
    name: str | None,
    overrides: Sequence[str] | None,
) -> "StageReport":
    job = job_of(checkpoint, recipe, overrides)
    from sse_convert.training.setup import make_accelerator
    from sse_convert.training.stage import pick_stage, run_stage

    stage, accelerator = pick_stage(job.recipe, loss, name), make_accelerator(job.recipe.train)
    return run_stage(job, stage, checkpoint, Path(out), accelerator, try_teacher=True)


def run(recipe: RecipeLike, *, overrides: Sequence[str] | None = None, resume: bool = True) -> "RunReport":
    """Do it all: choose layers, convert, calibrate, train, eval, export. Finished steps are skipped.

    On several GPUs: accelerate launch --multi_gpu -m sse_convert run RECIPE

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        overrides: `a.b=c` assignments (for a file or a name).
        resume: continue an earlier run of this recipe; otherwise there must be none.

    Raises:
        RecipeError: the recipe is malformed, lacks text that a later step needs, or does not fit the model.
        TrainingError: an earlier run had other inputs, or training does not stay finite.
        VerificationError: the exported model is destroyed (see `evaluation.verdict`).
        DataError, CheckpointError, OutputError, HardwareError, HubError: text, checkpoint, folder, machine or hub.
    """
    origin = str(recipe) if isinstance(recipe, Path | str) else "recipe"
    recipe = read_recipe(recipe, overrides)
    if problems := list(check_run(recipe)):
        raise problems_error(origin, problems)
    from sse_convert.pipeline import run_recipe

    return run_recipe(recipe, resume=resume)


def evaluate(
    recipe: RecipeLike,
    checkpoint: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> "EvalReport":
    """Measure a checkpoint beside its teacher as the recipe's `eval` says.

    Held-out loss, predictions, needles, lm-eval, memory and speed, as far as they are asked for.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted model, or a plain one to set beside the teacher; folder or hub id.
        overrides: `a.b=c` assignments (for a file or a name).
        out: JSON file for the report; an older one is replaced.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        RecipeError: the recipe is malformed; a length is beyond the teacher's context, unless a stage's `rope`
            stretches the student's; or the checkpoint was converted with other layers or mixers.
        CheckpointError, HubError, HardwareError: a model cannot be loaded.
        DataError: there is no usable held-out text, or the data of a task cannot be used.
        OutputError: the report cannot be written, or there is a file of another kind.
        DependencyError: lm-eval is asked for and the extra `eval` is not installed.
    """
    from sse_convert.files import check_result

    check_result(out)
    job = job_of(checkpoint, recipe, overrides)
    from sse_convert.evaluation.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(job, checkpoint, out=out, device=device)
