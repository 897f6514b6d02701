"""What the commands do, as functions of the same names. Heavy imports happen inside, so importing this is quick."""

import dataclasses as dc
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sse_convert.doctor import DoctorReport, diagnose
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.jsonschema import json_schema
from sse_convert.recipe.loader import problems_error, recipe_or_model
from sse_convert.recipe.presets import copy_preset, preset_names, preset_path, preset_summary, preset_text
from sse_convert.report import TextReport, table

if TYPE_CHECKING:
    from sse_convert.analysis.analysis_report import AnalysisReport
    from sse_convert.calibration.calibrate import CalibrateReport
    from sse_convert.evaluation.report import EvalReport
    from sse_convert.export.export import ExportReport
    from sse_convert.export.push import PushReport
    from sse_convert.inference.generate import ChatReport, GenerationReport
    from sse_convert.pages.compare import CompareReport
    from sse_convert.pages.run_page import PageReport
    from sse_convert.pipeline import RunReport
    from sse_convert.selection.selection_report import SelectReport
    from sse_convert.surgery.convert import ConvertReport
    from sse_convert.surgery.dequantize import DequantizeReport
    from sse_convert.surgery.expand import ExpandReport
    from sse_convert.surgery.inspect import InspectReport
    from sse_convert.surgery.plan_report import Plan
    from sse_convert.surgery.verify import VerifyReport
    from sse_convert.training.stage_report import StageReport

RecipeLike = Recipe | Path | str
"""a recipe, a recipe file, or the name of a packaged recipe"""


def plan(recipe: RecipeLike, *, overrides: Sequence[str] | None = None, allow_pickle: bool = False) -> "Plan":
    """What a recipe does to its model, and what it costs: layers, memory, GPU hours. Reads configs and headers only.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        overrides: `a.b=c` assignments (for a file or a name).
        allow_pickle: accept a teacher in pickle format (it can run code; trust its author).

    Raises:
        RecipeError: the recipe is malformed or does not fit the model.
        CheckpointError, HubError: the model cannot be read.
    """
    command = _run_command(recipe, overrides)
    recipe = _recipe(recipe, overrides)
    from sse_convert.surgery.plan import make_plan

    return dc.replace(make_plan(recipe, allow_pickle=allow_pickle), command=command)


def select(
    source: RecipeLike,
    keep: int,
    out: Path | str,
    *,
    methods: Sequence[str] = ("greedy",),
    text: Path | str | None = None,
    stand_in: str = "sliding",
    tokens: int = 8192,
    length: int = 1024,
    samples: int = 16,
    recall_weight: float = 1.0,
    device: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "SelectReport":
    """Choose which layers stay softmax attention, before any training.

    Args:
        source: a recipe, a recipe file, the name of a packaged recipe, or the folder or hub id of a model.
        keep: layers to keep.
        out: folder for scores, the recipe fragment and the report; an interrupted run is continued.
        methods: of greedy, kl-restore, sensitivity, recall-ratio, uniform; the first one decides. Without recall
            (weight 0, or a teacher that recalls nothing) recall-ratio is left out.
        text: file or folder to use in place of the recipe's `data.valid`.
        stand_in: mixer that replaces layers while choosing, untrained: a kind, or one of the recipe's.
        tokens: running text to predict.
        length: tokens per row.
        samples: needle (or copy) rows.
        recall_weight: recall beside text, both in nats per token.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.
        overrides: `a.b=c` assignments (for a file, a name or a model).

    Raises:
        UsageError: a setting is out of range, or needs what the model has not; or every method ranks by recall, and the
            model recalls nothing.
        RecipeError: the recipe is malformed.
        TrainingError: `out` was made from other inputs.
        DataError, CheckpointError, HubError, HardwareError, OutputError: text, model, machine or folder do not do.
    """
    recipe = source if isinstance(source, Recipe) else recipe_or_model(source, list(overrides or ()))
    from sse_convert.selection.select import select_layers
    from sse_convert.selection.setup import SelectSettings

    settings = SelectSettings(
        keep=keep,
        methods=tuple(methods),
        stand_in=stand_in,
        tokens=tokens,
        length=length,
        samples=samples,
        recall_weight=recall_weight,
    )
    return select_layers(recipe, Path(out), settings, text=None if text is None else Path(text), device=device)


def convert(
    recipe: RecipeLike,
    out: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    link: Literal["auto", "hard", "copy"] = "auto",
    check: bool = False,
    defer_digests: bool = False,
    allow_pickle: bool = False,
) -> "ConvertReport":
    """Make the hybrid checkpoint: the teacher's shards copied or linked, one shard of new tensors, config, code.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        out: the folder to make.
        overrides: `a.b=c` assignments (for a file or a name).
        link: auto hard-links shards of the hub cache and copies others (without room, where the file system can); hard
            links wherever it can, so that an edit of the result changes the teacher; copy links nothing.
        check: stream every shard first: NaN, Inf.
        defer_digests: do not read the teacher's shards for their SHA-256; manifest.json says which ones lack it.
        allow_pickle: accept a teacher in pickle format (it can run code; trust its author); its weights are stored as
            safetensors.

    Raises:
        RecipeError: the recipe is malformed or does not fit the model.
        CheckpointError, HubError: the teacher cannot be read or converted, or `check` found NaN or Inf.
        OutputError: `out` exists or cannot be written, or the disk is full; nothing is left behind.
    """
    recipe = _recipe(recipe, overrides)
    from sse_convert.surgery.convert import convert_checkpoint

    return convert_checkpoint(
        recipe, Path(out), link=link, check=check, defer_digests=defer_digests, allow_pickle=allow_pickle
    )


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
    recipe = _recipe(recipe, overrides)
    from sse_convert.calibration.calibrate import calibrate_checkpoint

    return calibrate_checkpoint(recipe, Path(checkpoint), Path(out))


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
    loss: Literal["layer_mse", "kl", "ce"],
    checkpoint: Path | str,
    out: Path | str,
    name: str | None,
    overrides: Sequence[str] | None,
) -> "StageReport":
    recipe = _recipe(recipe, overrides)
    from sse_convert.training.stage import pick_stage, run_stage

    return run_stage(recipe, pick_stage(recipe, loss, name), Path(checkpoint), Path(out))


def run(recipe: RecipeLike, *, overrides: Sequence[str] | None = None, resume: bool = True) -> "RunReport":
    """Do it all: convert, calibrate, every stage, eval, export, then the recipe's controls. Finished steps are skipped.

    On several GPUs: accelerate launch --multi_gpu -m sse_convert run RECIPE

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        overrides: `a.b=c` assignments (for a file or a name).
        resume: continue an earlier run of this recipe; otherwise there must be none.

    Raises:
        RecipeError: the recipe is malformed, lacks text that a later step needs, or does not fit the model.
        UsageError: a control is asked for that the recipe cannot have.
        TrainingError: an earlier run had other inputs, or training does not stay finite.
        VerificationError: a limit of `eval.gate` is missed, or the exported model is destroyed (see
            `evaluation.verdict`).
        DataError, CheckpointError, OutputError, HardwareError, HubError: text, checkpoint, folder, machine or hub.
    """
    origin = str(recipe) if isinstance(recipe, Path | str) else "recipe"
    command = _run_command(recipe, overrides)
    recipe = _recipe(recipe, overrides)
    if problems := list(check_run(recipe)):
        raise problems_error(origin, problems)
    from sse_convert.pipeline import run_recipe

    return run_recipe(recipe, resume=resume, command=command)


def evaluate(
    recipe: RecipeLike,
    checkpoint: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    out: Path | None = None,
    plot: Path | None = None,
    device: str | None = None,
) -> "EvalReport":
    """Measure a checkpoint beside its teacher as the recipe's `eval` says.

    Held-out loss, predictions, needles, RULER, questions, lm-eval, memory and speed, as far as they are asked for.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted model, or a plain one to set beside the teacher; folder or hub id.
        overrides: `a.b=c` assignments (for a file or a name).
        out: JSON file for the report; an older one is replaced.
        plot: PNG file for the plot.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        RecipeError: the recipe is malformed; a length is beyond the teacher's context, unless a stage's `rope`
            stretches the student's; or the checkpoint was converted with other layers or mixers.
        CheckpointError, HubError, HardwareError: a model cannot be loaded.
        DataError: there is no usable held-out text, or a question cannot be used.
        OutputError: the report, the plot or answers cannot be written.
        VerificationError: a limit of `eval.gate` is missed (the report is written first).
        DependencyError: RULER or lm-eval is asked for and the extra `eval` is not installed.
    """
    command = _run_command(recipe, overrides)
    recipe = _recipe(recipe, overrides)
    from sse_convert.evaluation.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(recipe, checkpoint, out=out, plot=plot, device=device, command=command)


def export(
    recipe: RecipeLike,
    checkpoint: Path | str,
    out: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    evaluation: Path | None = None,
) -> "ExportReport":
    """Write the finished model: safetensors, model card, recipe.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted (and trained) model, folder or hub id.
        out: the folder to make.
        overrides: `a.b=c` assignments (for a file or a name).
        evaluation: report of `evaluate` for the model card; unset looks for `evaluation.json` in the checkpoint.

    Raises:
        RecipeError: the recipe is malformed or describes another conversion.
        CheckpointError, HubError: not a converted checkpoint, damaged, unmerged adapters, NaN, Inf or overflow in the
            weights, or it cannot be read.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    recipe = _recipe(recipe, overrides)
    from sse_convert.export.export import export_checkpoint

    return export_checkpoint(recipe, checkpoint, Path(out), evaluation=evaluation)


def push(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    anyway: bool = False,
) -> "PushReport":
    """Upload an exported checkpoint to the hub as one commit. Log in first with `hf auth login`.

    A repository that already has a model is left alone unless a revision or a pull request is asked for; weights and
    code of the older upload are then replaced as a whole.

    Args:
        folder: result of `export`.
        repo_id: `owner/name`, or `name` for the logged-in user.
        private: create the repository as private.
        dry_run: check the folder and list what would be sent, without asking the hub anything.
        revision: branch to commit to; made if it does not exist.
        create_pr: open a pull request instead of committing.
        anyway: push a model that its evaluation calls destroyed, or whose weights are not finite.

    Raises:
        VerificationError: the evaluation says that the model is destroyed, or its weights are not finite.
        CheckpointError: the folder is not an exported model, is damaged, or holds pickles.
        UsageError: the repository name is malformed, or `revision` and `create_pr` are both given.
        HubError: not logged in, no permission, the repository exists, or the hub cannot be reached.
    """
    from sse_convert.export.push import push_folder

    return push_folder(
        folder, repo_id, private=private, dry_run=dry_run, revision=revision, create_pr=create_pr, anyway=anyway
    )


def generate(
    checkpoint: Path | str,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
) -> "GenerationReport":
    """Continue a text with a checkpoint (converted or not).

    Args:
        checkpoint: folder or hub id.
        prompt: text to continue.
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token.
        top_p: sample from the likeliest tokens of this total probability.
        seed: of sampling.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        UsageError: a setting out of range, an empty prompt, or one that does not fit the context.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    from sse_convert.inference.generate import Sampling, generate_text

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return generate_text(checkpoint, prompt, sampling=sampling, device=device)


def chat(
    checkpoint: Path | str,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 0.9,
    seed: int = 0,
    system: str | None = None,
    device: str | None = None,
) -> "ChatReport":
    """Talk with a checkpoint on stdin and stdout until end of input (Ctrl-D).

    Args:
        checkpoint: folder or hub id.
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token.
        top_p: sample from the likeliest tokens of this total probability.
        seed: of sampling.
        system: system message.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        UsageError: a setting out of range, or a system message without a chat template.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    from sse_convert.inference.generate import Sampling, chat_in_terminal

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return chat_in_terminal(checkpoint, sampling=sampling, system=system, device=device)


def inspect(checkpoint: Path | str, *, revision: str | None = None) -> "InspectReport":
    """What a checkpoint is, converted or not: family, layers, new tensors, where it comes from.

    Args:
        checkpoint: local folder or hub id.
        revision: hub revision.

    Raises:
        CheckpointError: it cannot be opened, or its family is unknown.
        HubError: the hub refused or cannot be reached.
    """
    from sse_convert.surgery.inspect import inspect_checkpoint

    return inspect_checkpoint(checkpoint, revision)


def analyze(
    model: Path | str,
    text: Path | str,
    *,
    teacher: Path | str | None = None,
    tokens: int = 16384,
    length: int | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> "AnalysisReport":
    """Look inside the converted layers of a model while it reads a text.

    Args:
        model: converted checkpoint, folder or hub id.
        text: UTF-8 file.
        teacher: the model it was made from, for output errors and attention distances.
        tokens: of the text, at most.
        length: tokens per row; unset takes 2048, or the model's context or the text if they are shorter.
        out: new folder for the report, its arrays and figures.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        DataError: the text is missing, empty, not UTF-8, or shorter than a row (128 tokens at least).
        CheckpointError, HubError: a model cannot be read, is not converted, or is not this model's teacher.
        UsageError: `tokens` or `length` is out of range.
        HardwareError: the device does not exist here.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    from sse_convert.analysis.analyze import analyze_model

    return analyze_model(model, Path(text), teacher=teacher, tokens=tokens, length=length, out=out, device=device)


def report(
    run: Path | str,
    *,
    out: Path | None = None,
    beside: Sequence[Path | str] = (),
    text: Path | None = None,
    prompts: Sequence[str] = (),
    max_new_tokens: int = 64,
    device: str | None = None,
) -> "PageReport":
    """Write a run, finished or not, as one HTML page that opens from disk.

    Args:
        run: `export.dir` of the recipe, the `.stages` folder beside it, or a converted checkpoint.
        out: the page; unset takes `<run>.report.html`. An older one is replaced.
        beside: runs or evaluation files whose figures stand beside it (controls).
        text: text file to analyse the model with first; the analysis stays in the run.
        prompts: texts to continue first with all models; the samples stay in the run.
        max_new_tokens: of each sample.
        device: for `text` and `prompts`; unset picks the accelerator, or the CPU.

    Raises:
        UsageError: there is no run or converted checkpoint, or something in `beside` was not evaluated.
        CheckpointError: a file of the run is damaged or of another version.
        OutputError: the page cannot be written, or `text` is given and the run has an analysis.
        DataError, HubError, HardwareError: text, hub or machine do not do, with `text` and `prompts`.
    """
    from sse_convert.pages.run_page import write_report

    return write_report(
        run, out=out, beside=beside, text=text, prompts=prompts, max_new_tokens=max_new_tokens, device=device
    )


def compare(sources: Sequence[Path | str], *, out: Path | None = None) -> "CompareReport":
    """Set runs, checkpoints or evaluations side by side; what is not comparable stands apart and says why.

    Args:
        sources: runs, checkpoints, or JSON files of `eval`; at least two.
        out: also write this HTML page; an older one is replaced.

    Raises:
        UsageError: fewer than two sources, one twice, one that is nothing of this, or no figure in common.
        CheckpointError: a file is damaged or of another version.
        OutputError: the page cannot be written.
    """
    from sse_convert.pages.compare import compare_runs

    return compare_runs(sources, out=out)


def expand(
    checkpoint: Path | str,
    out: Path | str,
    *,
    num_partitions: int | None = None,
    top_k: int | None = None,
    layers: Sequence[str] = (),
    init: Literal["copy", "random"] = "copy",
    shift: float = 2.0,
    seed: int = 0,
    text: Path | str | None = None,
) -> "ExpandReport":
    """Grow the state of a converted checkpoint: more partitions, more of them per token, nearly the same outputs.

    Args:
        checkpoint: converted checkpoint folder, trained or not.
        out: the folder to make.
        num_partitions: partitions (N) afterwards; unset keeps it.
        top_k: partitions per token (k) afterwards; unset keeps it.
        layers: indices or ranges such as 3-5; unset takes every SSE layer.
        init: new router rows are copies of the old ones, in turn, or small and random.
        shift: what is taken from the logits of new partitions; the larger, the less changes at first.
        seed: of random rows.
        text: file to measure the change of the logits on; unset measures nothing and loads no model.

    Raises:
        UsageError: a number would shrink or stay, a layer does not exist or has no partitions.
        CheckpointError: not a converted checkpoint.
        DataError: the text cannot be used.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    from sse_convert.surgery.expand import expand_checkpoint
    from sse_convert.surgery.growth import Growth

    growth = Growth(num_partitions=num_partitions, top_k=top_k, init=init, shift=shift, seed=seed)
    return expand_checkpoint(checkpoint, Path(out), growth, layers=layers, text=None if text is None else Path(text))


def dequantize(model: Path | str, out: Path | str, *, revision: str | None = None) -> "DequantizeReport":
    """Make a bfloat16 copy of a model whose weights are quantised (fp8 or mxfp4), which can be converted.

    Weights are read and written one by one: memory does not grow with the model.

    Args:
        model: folder or hub id.
        out: the folder to make.
        revision: hub branch, tag or commit.

    Raises:
        CheckpointError, HubError: the model cannot be read, is not quantised, or is so in another way.
        OutputError: `out` exists or cannot be written, or the disk is full; nothing is left behind.
    """
    from sse_convert.surgery.dequantize import dequantize_checkpoint

    return dequantize_checkpoint(model, Path(out), revision=revision)


def verify(checkpoint: Path | str, *, teacher: Path | str | None = None) -> "VerifyReport":
    """Prove that a converted checkpoint is what was written, complete and sound.

    SHA-256 of every file, names, shapes and dtypes of tensors, finite weights and logits, the teacher's tensors.

    Args:
        checkpoint: the folder, or the `.stages` folder of a run, whose steps are then verified one by one.
        teacher: the teacher's folder or hub id; unset looks where the checkpoint was made from. Shards that are the
            same file on disk are not read, others are compared bit by bit.

    Raises:
        VerificationError: something is wrong; the message lists what.
        CheckpointError: the folder cannot be opened, or is not a converted checkpoint.
    """
    from sse_convert.surgery.verify_run import verify_folder

    return verify_folder(checkpoint, teacher=teacher)


def recipes_list() -> TextReport:
    """The packaged recipes, with what each is for."""
    rows = [(name, preset_summary(name)) for name in preset_names()]
    return TextReport(
        {"recipes": [{"name": name, "summary": summary, "path": str(preset_path(name))} for name, summary in rows]},
        table(("recipe", "what it does"), rows),
    )


def recipes_show(name: str) -> TextReport:
    """The text of a packaged recipe.

    Args:
        name: as `recipes list` has it.

    Raises:
        RecipeError: there is no such recipe.
    """
    text = preset_text(name)
    return TextReport({"name": name, "text": text}, text.splitlines())


def recipes_copy(name: str, to: Path = Path("."), *, overwrite: bool = False) -> TextReport:
    """Copy a packaged recipe to a file or into a folder, to edit it.

    Args:
        name: as `recipes list` has it.
        to: file or folder.
        overwrite: replace an existing file.

    Raises:
        RecipeError: there is no such recipe.
        OutputError: the target exists or cannot be written.
    """
    written = copy_preset(name, to, overwrite=overwrite)
    return TextReport({"path": str(written)}, [f"wrote {written}; next: sse-convert plan {written}"])


def recipes_schema() -> TextReport:
    """The JSON schema of recipes, for editors.

    Save it as recipe.schema.json and start a recipe with the line
    # yaml-language-server: $schema=recipe.schema.json
    """
    schema = json_schema()
    return TextReport(schema, json.dumps(schema, indent=2).splitlines())


def doctor() -> DoctorReport:
    """Versions, devices, backends and optional packages of this machine."""
    return diagnose()


def _run_command(recipe: RecipeLike, overrides: Sequence[str] | None) -> str:
    """What runs this recipe, for messages; what it is overridden with belongs to it, its controls do not."""
    origin = str(recipe) if isinstance(recipe, Path | str) else "RECIPE"
    sets = [part for text in overrides or () if not text.startswith("controls=") for part in ("--set", text)]
    return shlex.join(["sse-convert", "run", origin, *sets])


def _recipe(recipe: RecipeLike, overrides: Sequence[str] | None) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe, list(overrides or ()))
