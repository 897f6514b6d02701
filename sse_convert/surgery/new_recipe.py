"""The best known recipe for a model as YAML: what it says is `recipe.recommended`, what it costs is the plan's."""

import dataclasses as dc
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.errors import UsageError
from sse_convert.files import write_text
from sse_convert.mixers import FULL
from sse_convert.recipe import Recipe, recipe_from_dict, resolve
from sse_convert.recipe.choosing import draft_recipe
from sse_convert.recipe.presets import recipe_target
from sse_convert.recipe.recommended import (
    LEAST_ROWS,
    LONGEST_ROW,
    MIXER,
    MOST_TOKENS,
    ModelSizes,
    budgets,
    may_train_all,
    recommended_calibration,
    recommended_layers,
    recommended_mixer,
    recommended_needles,
    recommended_stages,
)
from sse_convert.report import TextReport, counted, time_in_words
from sse_convert.surgery.costs import Way, way_on
from sse_convert.surgery.costs_report import fewest_gpus, gpus_in_words, least_memory
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import GIB, USABLE
from sse_convert.surgery.plan import make_plan
from sse_convert.surgery.plan_report import Plan
from sse_convert.surgery.recipe_lines import recipe_body, recipe_header, text_lines
from sse_convert.surgery.recipe_text import recipe_text
from sse_convert.surgery.recipe_time import Pace, fitted_share
from sse_convert.surgery.wanted_recipe import Cpu, Machine, NewRecipe, Wanted, read_weight_size, sizes_of

SHORTEST_HELD_OUT = 256
"""tokens of a row that is measured on; less text than that is refused by `run`"""
SHORTEST_ROW = 2048
"""of the second stage, below which a smaller machine is not helped"""
MOST_GPUS = 8
"""that share the rows of a step"""
CPU_ROW = 2048
"""tokens of the second stage's rows on a CPU"""
CPU_HOURS = 2.0
"""that a recipe for a CPU takes, where nobody says"""
FULL_EVAL = {"tokens": 131072, "samples": 200}
CPU_EVAL = {"tokens": 8192, "samples": 20}
"""tokens and needles of each length that are measured, on a GPU and on a CPU"""
TRAINED_BYTES = 12
"""of a parameter where converted layers alone are trained, about: student, teacher, gradients and moments in float32"""
USUAL_GIB = 80
"""of one GPU, which must hold all weights in training where a recipe for any machine is to train them"""


def new_recipe(teacher: Teacher, wanted: Wanted, machine: Machine | Cpu | None = None) -> NewRecipe:
    """The best known recipe for a model, with rows as long as the machine holds.

    Args:
        teacher: the opened model.
        wanted: names and text.
        machine: what it shall run on; None takes the fewest GPUs that hold rows of full length, as `plan` names them.

    Raises:
        CheckpointError, RecipeError: the model cannot be converted.
        UsageError: the time is too short.
    """
    made = _on_cpu(wanted, teacher, machine) if isinstance(machine, Cpu) else _chosen(wanted, teacher, machine)
    return dc.replace(made, text="\n".join([*recipe_header(wanted, made, teacher), *recipe_body(made), ""]))


@dc.dataclass(frozen=True, slots=True)
class _Shape:
    """What a machine holds of a recipe."""

    longest: int
    """tokens of a row"""
    least: int
    """rows of a step"""
    whole: bool
    """train all weights"""


def _chosen(wanted: Wanted, teacher: Teacher, machine: Machine | None) -> NewRecipe:
    """The one with the longest rows that fits, else that with the shortest rows; of full length for any machine. With
    all weights trained, where the rule does so, before those of converted layers alone."""
    sizes, longest, least = (
        sizes_of(teacher, wanted.weight_size),
        LONGEST_ROW,
        LEAST_ROWS if machine is None else machine.gpus,
    )
    ways = (True, False) if may_train_all(sizes) else (False,)
    made = None
    while longest >= SHORTEST_ROW:
        for shape in (_Shape(longest, least, whole) for whole in ways):
            made = _on_gpus(wanted, teacher, machine, shape)
            if made.fits:
                return made
        longest //= 2
    assert made is not None
    return made


def _on_gpus(wanted: Wanted, teacher: Teacher, machine: Machine | None, shape: _Shape) -> NewRecipe:
    """The recipe of a shape, within the time that is asked for."""
    sizes = sizes_of(teacher, wanted.weight_size)
    made = _planned(wanted, teacher, machine, shape, _most_share(wanted, sizes, 1.0))
    most = _most_share(wanted, sizes, sum(MOST_TOKENS) / sum(budgets(sizes)))
    for _ in range(0 if wanted.hours is None else 2):  # stages of another length may fit, and compile, in another way
        if made.way is not None and wanted.hours is not None:
            pace = _gpu_pace(made, made.way)
            share = fitted_share(pace, wanted.hours, lambda share: _stages(sizes, shape, share), most)
            made = _planned(wanted, teacher, machine, shape, share)
    return made


def _gpu_pace(made: NewRecipe, way: Way) -> Pace:
    """Of a recipe as it is launched."""
    assert made.plan.choice is not None
    gpus, costs = way.gpus, made.plan.costs
    twice = way.gpu_hours / costs.gpu_hours  # activations that must be
    stages = zip(costs.stages, made.recipe.stages, strict=True)
    return Pace(
        tokens=tuple(twice * cost.gpu_hours / stage.tokens / gpus for cost, stage in stages),
        beside=made.plan.choice.gpu_hours / gpus + way.beside,
    )


def _planned(wanted: Wanted, teacher: Teacher, machine: Machine | None, shape: _Shape, share: float) -> NewRecipe:
    data = _data(wanted, sizes_of(teacher, wanted.weight_size), shape, share)
    recipe, plan = _plan(data, wanted, teacher)
    way = _way_anywhere(plan, whole=shape.whole) if machine is None else _way_on(machine, recipe, teacher)
    return NewRecipe(text="", data=data, recipe=recipe, way=way, plan=plan)


def _plan(data: dict[str, Any], wanted: Wanted, teacher: Teacher, *, cpu: bool = False) -> tuple[Recipe, Plan]:
    """Plain data as a recipe, and what it does to the opened model."""
    recipe = recipe_from_dict(data, wanted.command)
    return recipe, make_plan(Job.of(recipe, lambda *_: teacher), cpu=cpu)


def _on_cpu(wanted: Wanted, teacher: Teacher, cpu: Cpu) -> NewRecipe:
    """The recipe that this CPU finishes in the time asked for: of all weights where the machine's memory holds that."""
    if may_train_all(sizes_of(teacher, wanted.weight_size)):
        made = _in_time(wanted, teacher, _Shape(CPU_ROW, 1, whole=True))
        if _cpu_bytes(made.plan) <= USABLE * cpu.memory:
            return made
    return _in_time(wanted, teacher, _Shape(CPU_ROW, 1, whole=False))


def _in_time(wanted: Wanted, teacher: Teacher, shape: _Shape) -> NewRecipe:
    sizes = sizes_of(teacher, wanted.weight_size)
    known = 1.0 if wanted.hours is None else sum(MOST_TOKENS) / sum(budgets(sizes))
    most = _most_share(wanted, sizes, known)
    _, drafted = _plan(_data(wanted, sizes, shape, most, CPU_EVAL), wanted, teacher, cpu=True)
    choice = drafted.choice
    assert choice is not None
    pace = Pace(
        tokens=tuple((stage.cpu_hours or 0.0) / stage.tokens for stage in drafted.stages),
        beside=(choice.cpu_hours or 0.0) + (drafted.cpu_beside_hours or 0.0),
    )
    share = fitted_share(pace, wanted.hours or CPU_HOURS, lambda share: _stages(sizes, shape, share), most)
    data = _data(wanted, sizes, shape, share, CPU_EVAL)
    recipe, plan = _plan(data, wanted, teacher, cpu=True)
    return NewRecipe(text="", data=data, recipe=recipe, way=None, plan=plan, pace=pace)


def _cpu_bytes(plan: Plan) -> int:
    """Of the stage that takes most of a CPU's memory."""
    return max(stage.cpu_bytes or 0 for stage in plan.stages)


def _most_share(wanted: Wanted, sizes: ModelSizes, known: float) -> float:
    """Of the rule's tokens, for which there is text.

    Args:
        wanted: its text counts.
        sizes: of the model.
        known: the share where there is enough of it.
    """
    return min(known, wanted.text.most_tokens / sum(budgets(sizes)))


def _stages(sizes: ModelSizes, shape: _Shape, share: float) -> list[dict[str, Any]]:
    return recommended_stages(sizes, shape.longest, share, shape.least, whole=shape.whole)


def write_new_recipe(
    model: str,
    to: Path,
    *,
    text: Sequence[Path | str],
    held_out: Sequence[Path | str],
    hours: float | None,
    overwrite: bool,
) -> TextReport:
    """Write the recipe of a model to a file. Arguments and errors as of `api.recipes_new`."""
    title = Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]
    target = recipe_target(to, title.lower(), overwrite=overwrite)
    teacher = open_for_planning(model)
    found = recipe_text(teacher, text, held_out)
    name, command = title.lower(), shlex.quote(str(target))
    size = read_weight_size(teacher)
    wanted = Wanted(model=model, name=name, title=title, command=command, text=found, weight_size=size, hours=hours)
    made, told = _for_here(teacher, wanted)
    write_text(target, made.text)
    choice = made.plan.choice
    assert choice is not None
    needs = "" if made.way is None else f"; needs {gpus_in_words(least_memory(made.plan.costs, made.way))}"
    lines = [
        f"wrote {target}: {choice.keep} of {len(choice.among)} {choice.what} to be chosen{needs}",
        *told,
        *(f"warning: {warning}" for warning in made.plan.warnings),
        *text_lines(wanted, made.recipe, teacher),
        *found.remarks,
        f"next: sse-convert plan {wanted.command}",
    ]
    way = None if made.way is None else dc.asdict(made.way)
    return TextReport({"path": str(target), "way": way, "fits": made.fits, "text": made.text}, lines)


def _for_here(teacher: Teacher, wanted: Wanted) -> tuple[NewRecipe, list[str]]:
    """The recipe for this machine, and what to tell of that.

    Raises:
        UsageError: the time is too short for this machine.
    """
    here = machine_here()
    if here is not None:
        made = new_recipe(teacher, wanted, here)
        gpus = f"{counted(here.gpus, 'GPU')} of {here.gib} GiB"
        told = f"warning: it does not fit {gpus} by the estimate of `plan`, even in rows of {SHORTEST_ROW}"
        return made, [] if made.fits else [told]
    if (cpu := cpu_of(teacher)) is not None:
        try:
            made = new_recipe(teacher, wanted, cpu)
        except UsageError as error:
            if wanted.hours is not None:
                raise
            slow = f"{error.what}; {error.fix}"
        else:
            assert made.pace is not None
            hours = time_in_words(made.pace.hours(made.data["stages"]))
            lines = [f"there is no GPU here: the recipe is for this CPU and takes {hours}; --hours changes that"]
            if (needed := _cpu_bytes(made.plan)) > cpu.memory:
                lines.append(f"warning: it takes {needed / GIB:.1f} GiB, and this machine has {cpu.memory / GIB:.1f}")
            return made, lines
    elif wanted.hours is not None:
        raise UsageError(
            f"--hours {wanted.hours:g}, and there is no GPU here",
            expected="a machine that can train the model: a GPU, or for small models without experts a CPU",
            fix="leave --hours out: the recipe is then for the fewest GPUs that hold its rows",
        )
    else:
        slow = ""
    any_gpus = "there is no GPU here: the recipe is for the fewest GPUs that hold its rows"
    return new_recipe(teacher, wanted), [any_gpus, *([slow] if slow else [])]


def cpu_of(teacher: Teacher) -> Cpu | None:
    """This CPU; None where its memory does not hold a training of the model, or the model has experts."""
    geometry, memory = geometry_of(teacher), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    trainable = not geometry.has_experts and geometry.parameters * TRAINED_BYTES <= memory
    return Cpu(memory) if trainable else None


def machine_here() -> Machine | None:
    """The GPUs of this host that can share the rows of a step, whose number is a power of two; None without any."""
    count = min(MOST_GPUS, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(1 << (count.bit_length() - 1), math.ceil(min(memory) / GIB)) if memory else None


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


def _data(
    wanted: Wanted, sizes: ModelSizes, shape: _Shape, share: float, measured_on: dict[str, int] = FULL_EVAL
) -> dict[str, Any]:
    """The recipe as plain data.

    Args:
        wanted: names and text.
        sizes: of the model.
        shape: that the machine holds.
        share: of the rule's tokens.
        measured_on: tokens and needles of each length.
    """
    text, measured = wanted.text, sizes.measured
    stages, mixer = _stages(sizes, shape, share), recommended_mixer(min(sizes.positions, shape.longest), measured)
    if text.chats:
        stages = [{**stage, "loss_mask": "assistant"} for stage in stages]
    needles = recommended_needles(sizes, min(stage["seq_len"] for stage in stages))
    return {
        "recipe_version": 1,
        "model": wanted.model,
        "layers": recommended_layers(sizes.full, measured),
        "mixers": {MIXER: mixer} if mixer else {},
        "calibrate": recommended_calibration(sizes, shape.longest),
        "stages": stages,
        "data": {
            "train": list(text.train),
            "valid": list(text.valid),
            **({"needles": needles} if needles else {}),
        },
        "eval": _eval([stage["seq_len"] for stage in stages], text.held_out, measured_on),
        "export": {"dir": f"out/{wanted.name}-sse", **({"license": wanted.license} if wanted.license else {})},
    }


def _eval(lengths: list[int], held_out: int | None, measured_on: dict[str, int]) -> dict[str, Any]:
    """What is measured, in rows that the held-out text fills.

    Args:
        lengths: tokens of training rows.
        held_out: tokens of the text, about; None for enough.
        measured_on: tokens and needles of each length.
    """
    most = max(SHORTEST_HELD_OUT, 1 << (held_out * 3 // 4).bit_length() - 1) if held_out else max(lengths)
    lengths = list(dict.fromkeys(min(length, most) for length in lengths))
    needle = {"lengths": lengths, "samples": measured_on["samples"]}
    return {"lengths": lengths, "tokens": measured_on["tokens"], "needle": needle}
