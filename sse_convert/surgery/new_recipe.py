"""The best known recipe for a model as YAML: what it says is `recipe.recommended`, what it costs is the plan's."""

import dataclasses as dc
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.files import write_text
from sse_convert.mixers import FULL
from sse_convert.recipe import Recipe, recipe_from_dict, resolve
from sse_convert.recipe.choosing import draft_recipe
from sse_convert.recipe.presets import recipe_target
from sse_convert.recipe.recommended import (
    LEAST_ROWS,
    LONGEST_ROW,
    MIXER,
    STATE_HEADS,
    ModelSizes,
    budgets,
    may_train_all,
    recommended_calibration,
    recommended_layers,
    recommended_mixer,
    recommended_needles,
    recommended_stages,
)
from sse_convert.recipe.units import format_count
from sse_convert.report import TextReport, format_flow, format_number, time_in_words
from sse_convert.surgery.costs import StageCost, Way, way_on
from sse_convert.surgery.costs_report import fewest_gpus, gpus_in_words, launch_command
from sse_convert.surgery.memory import GIB
from sse_convert.surgery.plan import geometry_of, make_plan
from sse_convert.surgery.plan_report import Plan, StageRow
from sse_convert.surgery.recipe_text import MOST_PASSES, WEB_TEXT, RecipeText, recipe_text

SHORTEST_HELD_OUT = 256
"""tokens of a row that is measured on; less text than that is refused by `run`"""
SHORTEST_ROW = 2048
"""of the second stage, below which a smaller machine is not helped"""
MOST_GPUS = 8
"""that share the rows of a step"""
USUAL_GIB = 80
"""of one GPU, which must hold all weights in training where a recipe for any machine is to train them"""


@dc.dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one host."""

    gpus: int
    gib: int
    """memory of each"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked for beside the model."""

    model: str
    """hub id or folder"""
    name: str
    """of the recipe"""
    title: str
    """of the model"""
    command: str
    """how commands name the recipe"""
    text: RecipeText = WEB_TEXT
    """to train on, and to measure on"""
    license: str | None = None
    note: str = ""
    """a line of the header"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class NewRecipe:
    """A recipe as text, and what it is for."""

    text: str
    data: dict[str, Any]
    """the same as plain data"""
    recipe: Recipe
    way: Way | None
    """how to launch it; None where it does not fit"""
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether it fits the machine."""
        return self.way is not None


def new_recipe(teacher: Teacher, wanted: Wanted, machine: Machine | None = None) -> NewRecipe:
    """The best known recipe for a model, with rows as long as the machine holds.

    Args:
        teacher: the opened model.
        wanted: names and text.
        machine: what it shall run on; None takes the fewest GPUs that hold rows of full length, as `plan` names them.

    Raises:
        CheckpointError, RecipeError: the model cannot be converted.
    """
    made = _chosen(wanted, teacher, machine)
    return dc.replace(made, text="\n".join([*_header(wanted, made, teacher), *_body(made.data, made.plan), ""]))


def _chosen(wanted: Wanted, teacher: Teacher, machine: Machine | None) -> NewRecipe:
    """The one with the longest rows that fits, else that with the shortest rows; of full length for any machine."""
    made = None
    for made in _of_every_row(wanted, teacher, machine):
        if made.fits:
            break
    assert made is not None
    return made


def _of_every_row(wanted: Wanted, teacher: Teacher, machine: Machine | None) -> Iterator[NewRecipe]:
    """With rows of full length, then of half of it each time, without text; with all weights trained, where the rule
    does so, before those of converted layers alone."""
    sizes, longest = sizes_of(teacher), LONGEST_ROW
    while longest >= SHORTEST_ROW:
        for whole in (True, False) if may_train_all(sizes) else (False,):
            data = _data(wanted, sizes, longest, LEAST_ROWS if machine is None else machine.gpus, whole=whole)
            recipe = recipe_from_dict(data, wanted.command)
            plan = make_plan(recipe, teacher=teacher)
            way = _way_anywhere(plan, whole=whole) if machine is None else _way_on(machine, recipe, teacher)
            yield NewRecipe(text="", data=data, recipe=recipe, way=way, plan=plan)
        longest //= 2


def write_new_recipe(
    model: str, to: Path, *, text: Sequence[Path | str], held_out: Sequence[Path | str], overwrite: bool
) -> TextReport:
    """Write the recipe of a model to a file. Arguments and errors as of `api.recipes_new`."""
    title = Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]
    target = recipe_target(to, title.lower(), overwrite=overwrite)
    teacher, here = open_for_planning(model), machine_here()
    found = recipe_text(teacher, text, held_out)
    wanted = Wanted(model=model, name=title.lower(), title=title, command=shlex.quote(str(target)), text=found)
    made = new_recipe(teacher, wanted, here)
    write_text(target, made.text)
    choice = made.plan.choice
    assert choice is not None
    needs = "" if made.way is None else f"; needs {gpus_in_words(made.way)}"
    lines = [f"wrote {target}: {choice.keep} of {len(choice.among)} {choice.what} to be chosen{needs}"]
    if here is None:
        lines.append("there is no GPU here: the recipe is for the fewest GPUs that hold its rows")
    elif made.way is None:
        gpus = f"{here.gpus} GPU{'s' * (here.gpus > 1)} of {here.gib} GiB"
        lines.append(f"warning: it does not fit {gpus} by the estimate of `plan`, even in rows of {SHORTEST_ROW}")
    lines += [*_text_lines(wanted, made.recipe, teacher), *found.remarks]
    way = None if made.way is None else dc.asdict(made.way)
    data = {"path": str(target), "way": way, "fits": made.fits, "text": made.text}
    return TextReport(data, [*lines, f"next: sse-convert plan {wanted.command}"])


def machine_here() -> Machine | None:
    """The GPUs of this host that can share the rows of a step, whose number is a power of two; None without any."""
    import torch

    count = min(MOST_GPUS, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(1 << (count.bit_length() - 1), math.ceil(min(memory) / GIB)) if memory else None


def sizes_of(teacher: Teacher) -> ModelSizes:
    """What the rule reads of a model."""
    softmax = set(teacher.softmax_layers)
    return ModelSizes(
        width=teacher.dims.hidden,
        parameters=teacher.files.parameters,
        positions=teacher.text.max_position_embeddings,
        full=tuple(i in softmax and window is None for i, window in enumerate(teacher.windows)),
        heads=teacher.separable_heads,
    )


def _way_anywhere(plan: Plan, *, whole: bool) -> Way | None:
    """The fewest GPUs; None where all weights are to be trained and one usual GPU does not hold that."""
    way = fewest_gpus(plan.costs)
    fits = way is not None and way.gpus == 1 and way.gib <= USUAL_GIB and not way.lora
    return way if fits or not whole else None


def _way_on(machine: Machine, recipe: Recipe, teacher: Teacher) -> Way | None:
    names, mixers = resolve(draft_recipe(recipe, teacher.num_layers, teacher.separable_heads), teacher.num_layers)
    layers = [None if name == FULL else mixers[name] for name in names]
    way = way_on(recipe, teacher, geometry_of(teacher), mixers, layers, gpus=machine.gpus, gib=machine.gib)
    return None if way is None or way.lora else way


def _data(wanted: Wanted, sizes: ModelSizes, longest: int, least: int, *, whole: bool) -> dict[str, Any]:
    """The recipe as plain data.

    Args:
        wanted: names and text.
        sizes: of the model.
        longest: tokens of a row that the machine holds.
        least: rows of a step.
        whole: train all weights.
    """
    text, measured = wanted.text, sizes.measured
    share = min(1.0, text.most_tokens / sum(budgets(sizes)))
    stages = recommended_stages(sizes, longest, share, least, whole=whole)
    if text.chats:
        stages = [{**stage, "loss_mask": "assistant"} for stage in stages]
    needles = recommended_needles(sizes, min(stage["seq_len"] for stage in stages))
    return {
        "recipe_version": 1,
        "model": wanted.model,
        "layers": recommended_layers(sizes.full, measured),
        "mixers": {MIXER: recommended_mixer(sizes.positions, measured)},
        "calibrate": recommended_calibration(sizes),
        "stages": stages,
        "data": {
            "train": list(text.train),
            "valid": list(text.valid),
            **({"needles": needles} if needles else {}),
        },
        "eval": _eval([stage["seq_len"] for stage in stages], text.held_out),
        "export": {"dir": f"out/{wanted.name}-sse", **({"license": wanted.license} if wanted.license else {})},
    }


def _eval(lengths: list[int], held_out: int | None) -> dict[str, Any]:
    """What is measured, in rows that the held-out text fills.

    Args:
        lengths: tokens of training rows.
        held_out: tokens of the text, about; None for enough.
    """
    most = max(SHORTEST_HELD_OUT, 1 << (held_out * 3 // 4).bit_length() - 1) if held_out else max(lengths)
    lengths = list(dict.fromkeys(min(length, most) for length in lengths))
    return {"lengths": lengths, "tokens": 131072, "needle": {"lengths": lengths, "samples": 500}}


def _header(wanted: Wanted, made: NewRecipe, teacher: Teacher) -> list[str]:
    assert made.plan.choice is not None
    choice, way, sizes = made.plan.choice, made.way, sizes_of(teacher)
    measured = sizes.measured
    ruled = f"rates by width ({measured.width} to {teacher.dims.hidden}), tokens of a step, rows"
    ruled += "" if made.data["mixers"][MIXER] == recommended_mixer(measured=measured) else ", window"
    kept = f"{choice.keep} of {len(choice.among)} {choice.what} stay softmax, chosen before training"
    command = f"sse-convert run {wanted.command}"
    lines = [
        f"{wanted.title}: {kept}; all else becomes SSE beside a window.",
        f"Plan:  sse-convert plan {wanted.command}",
        f"Run:   {command if way is None else launch_command(way, command)}",
        f"Takes: {_takes(way, choice.gpu_hours)}",
        "       GPU time is that of `plan`, if several GPUs lose nothing; below, with activations computed once.",
        *_evidence(made.recipe, sizes),
        f"By rule from there: {ruled}.",
        f"Not measured: {_unmeasured(made.recipe, sizes)}.",
        *(line[0].upper() + line[1:] + "." for line in _text_lines(wanted, made.recipe, teacher)),
        *([wanted.note] if wanted.note else []),
    ]
    return [f"# {line}" for line in lines]


def _evidence(recipe: Recipe, sizes: ModelSizes) -> list[str]:
    """What was measured of the parts of a recipe."""
    name = sizes.measured.name
    if not sizes.measured.by_heads:
        return [
            f"Measured, on teachers of 30M and 32M parameters (recipe {name}): choosing layers, SSE beside a window,",
            "       training of converted layers alone, AdamW, two stages of KL.",
        ]
    planted = ", planted facts" * bool(recipe.data.needles.share)
    return [
        f"Measured, on SmolLM2-135M-Instruct (recipe {name}): choosing heads, one state beside a window,",
        f"       Muon, two stages of KL{planted}.",
    ]


def _unmeasured(recipe: Recipe, sizes: ModelSizes) -> str:
    """What no measurement stands for."""
    if not sizes.measured.by_heads:
        return f"this model, its share of layers, its text and tokens, state_heads: {STATE_HEADS}"
    alone = ", training of converted layers alone" * any(stage.train == "mixers" for stage in recipe.stages)
    return f"this model, its share of heads, its text and tokens{alone}"


def _text_lines(wanted: Wanted, recipe: Recipe, teacher: Teacher) -> list[str]:
    """How much text there is, and how often the recipe reads it."""
    text, tokens = wanted.text, sum(stage.tokens for stage in recipe.stages)
    if text.tokens is None:
        return []
    of_rule, passes = sum(budgets(sizes_of(teacher))), text.passes(tokens)
    read = f"{passes:.0f} times" if passes >= 1.5 else "once" if passes >= 0.75 else f"{passes:.0%} of it"
    told = f"text: about {format_number(text.tokens)} tokens in the files, read {read} ({format_number(tokens)} tokens"
    if text.passes(of_rule) <= MOST_PASSES:
        return [f"{told})"]
    return [f"{told}; the rule's {format_number(of_rule)} would read it {text.passes(of_rule):,.0f} times)"]


def _takes(way: Way | None, choosing: float) -> str:
    """The machine, how it is used, memory and GPU time with that of a choice."""
    if way is None:
        return "more memory than the GPUs that it was written for have, by the estimate of `plan`."
    how = "" if way.how == "as it is" else f" ({way.how})"
    return f"{gpus_in_words(way)}{how}, {way.bytes / GIB:.1f} GiB of each used; {_time(way.gpu_hours + choosing)}."


def _body(data: dict[str, Any], plan: Plan) -> list[str]:
    """The recipe's lines, one for each key of the first level or entry of a list, with costs behind them."""
    assert plan.choice is not None
    chosen, layers = plan.choice, data["layers"]
    return [
        f"recipe_version: {data['recipe_version']}",
        f"model: {format_flow([data['model']])[1:-1]}",
        "layers:",
        f"  pattern: {format_flow(layers['pattern'])}",
        f"  # at most {chosen.passes} forward passes over {chosen.tokens:,} tokens; {_time(chosen.gpu_hours)}",
        f"  select: {format_flow(layers['select'])}",
        "mixers:",
        *(f"  {name}: {format_flow(settings)}" for name, settings in data["mixers"].items()),
        f"calibrate: {_with_units(data['calibrate'])}",
        "stages:",
        *(
            line
            for parts in zip(data["stages"], plan.stages, plan.costs.stages, strict=True)
            for line in _stage(*parts)
        ),
        "data:",
        *(line for key in ("train", "valid") for line in _sources(key, data["data"][key])),
        *(f"  {key}: {format_flow(data['data'][key])}" for key in ("needles",) if key in data["data"]),
        f"eval: {_with_units(data['eval'])}",
        f"export: {format_flow(data['export'])}",
    ]


def _stage(stage: dict[str, Any], row: StageRow, cost: StageCost) -> list[str]:
    return [
        f"  # {row.steps:,} steps; {_time(cost.gpu_hours)}",
        f"  - {_with_units(stage)}",
    ]


def _sources(key: str, sources: list[dict[str, Any]]) -> list[str]:
    return [f"  {key}:", *(f"    - {format_flow(source)}" for source in sources)]


def _with_units(data: dict[str, Any]) -> str:
    """One line of YAML with counts as people write them: `4K`."""
    return format_flow(_spelled(data))


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelled(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if type(value) is not int or value < 1024:
        return value
    text = f"{value / 1_000_000:g}M" if value % 10_000 == 0 else format_count(value)
    return value if text.isdigit() else text


def _time(hours: float) -> str:
    return f"{time_in_words(hours)} of GPU time"
