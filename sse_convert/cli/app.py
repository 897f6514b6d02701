"""The command line: parse, call `sse_convert.api`, print. Nothing heavy is imported before a command runs."""

import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from sse_convert import __version__, api
from sse_convert.cli.runner import command, exit_code_table, run_app
from sse_convert.recipe.presets import preset_names
from sse_convert.recipe.schema import RulerName
from sse_convert.report import Report
from sse_convert.trust import OPTION, trust_code

app = typer.Typer(
    name="",
    help="Turn a pretrained Transformer into a hybrid with Sparse State Expansion linear attention.\n\n"
    "Start with `sse-convert recipes list`, then `sse-convert plan RECIPE`, then `sse-convert run RECIPE`.",
    epilog=exit_code_table(),
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(
    name="recipes", help="List, show or copy the packaged recipes, or print their JSON schema.", rich_markup_mode=None
)
app.add_typer(recipes_app)

RULER = get_args(RulerName)
CONTINUES = "run the same command again to continue from the last checkpoint"


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe file, or a name from `recipes list`.",
        autocompletion=_complete_recipe,
        show_default=False,
    ),
]
PresetArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Name from `recipes list`.", autocompletion=_complete_recipe, show_default=False
    ),
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder or hub id.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a recipe value, for example stages.0.tokens=1M. Repeatable."
    ),
]
CheckpointOption = Annotated[Path, typer.Option("--checkpoint", "-c", help="Converted checkpoint to start from.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="New folder for the result.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
StageOption = Annotated[
    str | None, typer.Option("--stage", help="Stage name, where the recipe has several of this kind.")
]

PickleOption = Annotated[
    bool, typer.Option("--allow-pickle", help="Accept a teacher in pickle format (it can run code; trust its author).")
]
MaxTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Sampling seed.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Such as cuda:1 or cpu; unset picks the GPU.")]


def _names(key: str, text: str | None, everything: tuple[str, ...] = ()) -> list[str]:
    """The override that sets a list of names, written with commas; `all` where that is a choice."""
    if text is None:
        return []
    names = everything if text == "all" and everything else [name.strip() for name in text.split(",")]
    return [f"{key}=[{', '.join(names)}]"]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(OPTION, help="Let code run that a model or a task file carries. Read it first.")
    ] = False,
) -> None:
    if trust_remote_code:
        trust_code()
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@command(app, "plan")
def _plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> Report:
    """Show what a recipe does to its model: layers, parameters, memory, FLOPs. Reads configs and headers only."""
    return api.plan(recipe, overrides=overrides, allow_pickle=allow_pickle)


@command(app, "select", after_interrupt="run the same command again; what was measured is kept")
def _select(
    source: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RECIPE", help="Recipe, or model folder or hub id.", show_default=False)
    ],
    keep: Annotated[int, typer.Option("--keep", min=1, help="Softmax layers to keep.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for scores and the recipe fragment.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="greedy, kl-restore, sensitivity, recall-ratio or uniform. Repeatable; the first decides.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="Text file or folder; unset: the recipe's valid.")] = None,
    stand_in: Annotated[
        str, typer.Option(help="Mixer that replaces layers meanwhile: sliding, sse, gla, ...")
    ] = "sliding",
    tokens: Annotated[int, typer.Option(help="Tokens of running text to predict.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    samples: Annotated[int, typer.Option(help="Needle rows.")] = 16,
    recall_weight: Annotated[float, typer.Option(help="Recall beside text, both in nats per token.")] = 1.0,
    device: DeviceOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Choose which layers stay softmax attention, before any training. Writes a recipe fragment and scores."""
    return api.select(
        source,
        keep,
        out,
        methods=method or ["greedy"],
        text=text,
        stand_in=stand_in,
        tokens=tokens,
        length=length,
        samples=samples,
        recall_weight=recall_weight,
        device=device,
        overrides=overrides,
    )


@command(app, "convert", after_interrupt="no half-made folder was left; run the same command again")
def _convert(
    recipe: RecipeArgument,
    out: OutOption,
    overrides: SetOption = None,
    link: Annotated[Literal["hard", "copy"], typer.Option(help="Hard-link or copy the teacher's shards.")] = "hard",
    check: Annotated[bool, typer.Option("--check", help="Also stream every shard: hashes, NaN, Inf.")] = False,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> Report:
    """Make the hybrid checkpoint. Needs no data and no GPU, and never rewrites the teacher's weights."""
    return api.convert(recipe, out, overrides=overrides, link=link, check=check, allow_pickle=allow_pickle)


@command(app, "calibrate", after_interrupt="no half-made folder was left; run the same command again")
def _calibrate(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    out: OutOption,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Set the new tensors of a converted checkpoint from teacher statistics."""
    return api.calibrate(recipe, checkpoint, out, overrides=overrides)


@command(app, "align", after_interrupt=CONTINUES)
def _align(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    out: OutOption,
    stage: StageOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Train each converted layer to give its teacher layer's output (loss: layer_mse)."""
    return api.align(recipe, checkpoint, out, stage=stage, overrides=overrides)


@command(app, "distill", after_interrupt=CONTINUES)
def _distill(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    out: OutOption,
    stage: StageOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Train on the teacher's predictions (loss: kl)."""
    return api.distill(recipe, checkpoint, out, stage=stage, overrides=overrides)


@command(app, "uptrain", after_interrupt=CONTINUES)
def _uptrain(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    out: OutOption,
    stage: StageOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Train on the text itself, long context or chat (loss: ce)."""
    return api.uptrain(recipe, checkpoint, out, stage=stage, overrides=overrides)


@command(app, "run", after_interrupt="run the same command again to continue where it stopped")
def _run(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an earlier run of this recipe.")
    ] = True,
    controls: Annotated[
        str | None, typer.Option("--controls", metavar="NAMES", help="Control runs: names with commas, or all.")
    ] = None,
    as_json: JsonOption = False,
) -> Report:
    """Do it all: convert, calibrate, every stage, eval, export, control runs. Finished steps are skipped.

    On several GPUs: accelerate launch --multi_gpu -m sse_convert run RECIPE
    """
    overrides = [*(overrides or []), *_names("controls", controls)]
    return api.run(recipe, overrides=overrides, resume=resume)


@command(app, "eval")
def _evaluate(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the result to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the result to this PNG file.")] = None,
    ruler: Annotated[
        str | None, typer.Option("--ruler", metavar="TASKS", help="RULER needle tasks: names with commas, or all.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="TASKS", help="lm-eval tasks: names with commas, or paper.")
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Measure a checkpoint beside its teacher: held-out loss, predictions, needles, RULER, lm-eval, memory, speed.

    --ruler and --tasks set eval.ruler.tasks and eval.lm_eval.tasks; --set changes the rest, such as eval.ruler.lengths.
    """
    overrides = [*(overrides or []), *_names("eval.ruler.tasks", ruler, RULER), *_names("eval.lm_eval.tasks", tasks)]
    return api.evaluate(recipe, checkpoint, overrides=overrides, out=out, plot=plot, device=device)


@command(app, "export", after_interrupt="no half-made folder was left; run the same command again")
def _export(
    recipe: RecipeArgument,
    checkpoint: CheckpointOption,
    out: OutOption,
    overrides: SetOption = None,
    evaluation: Annotated[
        Path | None, typer.Option("--evaluation", help="JSON of `eval --out`, for the model card's figures.")
    ] = None,
    as_json: JsonOption = False,
) -> Report:
    """Write the finished model: safetensors, model card, recipe."""
    return api.export(recipe, checkpoint, out, overrides=overrides, evaluation=evaluation)


@command(app, "push", after_interrupt="run the same command again; finished files are not sent twice")
def _push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Exported checkpoint.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Hub repository, user/name.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be uploaded.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Push a destroyed model as well.")] = False,
    as_json: JsonOption = False,
) -> Report:
    """Upload an exported checkpoint to the hub. Log in first with `hf auth login`."""
    return api.push(
        folder, repo_id, private=private, dry_run=dry_run, revision=revision, create_pr=create_pr, anyway=anyway
    )


@command(app, "generate", to_stdout=True)
def _generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads stdin.", show_default=False)
    ],
    max_new_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Continue a text with a checkpoint, converted or not."""
    text = sys.stdin.read() if prompt == "-" else prompt
    return api.generate(
        checkpoint,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=device,
    )


@command(app, "chat")
def _chat(
    checkpoint: CheckpointArgument,
    max_new_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.9,
    seed: SeedOption = 0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Talk with a checkpoint until end of input (Ctrl-D)."""
    return api.chat(
        checkpoint,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        system=system,
        device=device,
    )


@command(app, "inspect")
def _inspect(checkpoint: CheckpointArgument, as_json: JsonOption = False) -> Report:
    """Show what a checkpoint is: family, layers, new tensors, where it comes from."""
    return api.inspect(checkpoint)


@command(app, "analyze")
def _analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Converted checkpoint, folder or hub id.", show_default=False)
    ],
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text file for the model to read.", show_default=False)],
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="Teacher folder or hub id, for what compares with it.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the text to use at most.")] = 16384,
    length: Annotated[
        int | None, typer.Option("--length", help="Tokens per row; unset takes 2048, or what model and text allow.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the report as JSON, arrays and figures.")
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Look inside the converted layers: states, memory, routing, branches, errors, with the paper's figures."""
    return api.analyze(model, text, teacher=teacher, tokens=tokens, length=length, out=out, device=device)


@command(app, "report")
def _report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="Folder of a run, or a converted checkpoint.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file; unset takes RUN_DIR.report.html.")] = None,
    beside: Annotated[
        list[Path] | None, typer.Option("--beside", help="Run or evaluation JSON to set beside it. Repeatable.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file to analyse the model with first (see `analyze`).")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue first, with all models. Repeatable.")
    ] = None,
    max_new_tokens: MaxTokensOption = 64,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Write a run, finished or not, as one HTML page: quality, memory, speed, layers, training, states, samples."""
    return api.report(
        run,
        out=out,
        beside=beside or (),
        text=text,
        prompts=prompts or (),
        max_new_tokens=max_new_tokens,
        device=device,
    )


@command(app, "compare", to_stdout=True)
def _compare(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", help="Runs, checkpoints, or JSON files of `eval`.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write this HTML page.")] = None,
    as_json: JsonOption = False,
) -> Report:
    """Set runs, checkpoints or evaluations side by side; what is not comparable stands apart and says why."""
    return api.compare(sources, out=out)


@command(app, "expand", after_interrupt="no half-made folder was left; run the same command again")
def _expand(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Converted checkpoint folder.", show_default=False)
    ],
    out: OutOption,
    num_partitions: Annotated[
        int | None, typer.Option("--num-partitions", help="N afterwards; unset keeps it.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="k afterwards; unset keeps it.")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", help="Index or range such as 3-5; repeatable. Unset: all SSE layers."),
    ] = None,
    init: Annotated[Literal["copy", "random"], typer.Option(help="New router rows.")] = "copy",
    shift: Annotated[float, typer.Option(help="Taken from the logits of new partitions; more changes less.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of random rows.")] = 0,
    text: Annotated[Path | None, typer.Option("--text", help="Measure the change of the logits on this file.")] = None,
    as_json: JsonOption = False,
) -> Report:
    """Grow the state of a converted checkpoint: more partitions, nearly the same outputs, then train on."""
    return api.expand(
        checkpoint,
        out,
        num_partitions=num_partitions,
        top_k=top_k,
        layers=layers or [],
        init=init,
        shift=shift,
        seed=seed,
        text=text,
    )


@command(app, "verify")
def _verify(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Converted checkpoint folder.", show_default=False)
    ],
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="Teacher folder or hub id; unset looks where it was made from.")
    ] = None,
    as_json: JsonOption = False,
) -> Report:
    """Prove that a checkpoint is complete: names, shapes, dtypes, finite weights and logits."""
    return api.verify(checkpoint, teacher=teacher)


@command(app, "doctor", to_stdout=True)
def _doctor(as_json: JsonOption = False) -> Report:
    """Report versions, devices, operator backends and optional packages."""
    return api.doctor()


@command(recipes_app, "list", to_stdout=True)
def _recipes_list(as_json: JsonOption = False) -> Report:
    """List the packaged recipes."""
    return api.recipes_list()


@command(recipes_app, "show", to_stdout=True)
def _recipes_show(name: PresetArgument, as_json: JsonOption = False) -> Report:
    """Print a packaged recipe."""
    return api.recipes_show(name)


@command(recipes_app, "copy")
def _recipes_copy(
    name: PresetArgument,
    to: Annotated[Path, typer.Argument(metavar="TO", help="File or folder.")] = Path("."),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> Report:
    """Copy a packaged recipe, to edit it."""
    return api.recipes_copy(name, to, overwrite=overwrite)


@command(recipes_app, "schema", to_stdout=True)
def _recipes_schema(as_json: JsonOption = False) -> Report:
    """Print the JSON schema of recipes, for editors.

    Save it as recipe.schema.json and start a recipe with the line
    # yaml-language-server: $schema=recipe.schema.json
    """
    return api.recipes_schema()


def main() -> None:
    """Entry point of `sse-convert`, `python -m sse_convert` and the root `cli.py`."""
    try:
        sys.exit(run_app(app, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
