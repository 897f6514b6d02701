"""The best known recipe for a model as YAML: what it says is `recipe.recommended`, what it costs is the plan's."""

import dataclasses as dc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.teacher import Teacher, open_teacher
from sse_convert.data.rows import is_local
from sse_convert.errors import DataError
from sse_convert.files import write_text
from sse_convert.mixers import FULL
from sse_convert.recipe import Recipe, recipe_from_dict, resolve
from sse_convert.recipe.choosing import draft_recipe
from sse_convert.recipe.presets import recipe_target
from sse_convert.recipe.recommended import (
    LONGEST_ROW,
    MEASURED,
    MEASURED_WIDTH,
    MIXER,
    STATE_HEADS,
    ModelSizes,
    measured,
    recommended_layers,
    recommended_mixer,
    recommended_stages,
)
from sse_convert.recipe.schema import Source
from sse_convert.recipe.units import format_count
from sse_convert.report import TextReport, format_flow
from sse_convert.surgery.memory import GIB, GPU_GIB, USABLE, Processes, stage_memory
from sse_convert.surgery.plan import geometry_of, make_plan
from sse_convert.surgery.plan_report import Plan, StageRow

DENSE_SPEED, EXPERT_SPEED = 400e12, 100e12
"""FLOP/s of a GPU by which hours are named; that of experts is not measured"""
SHORTEST_ROW = 2048
"""of the second stage, below which a smaller machine is not helped"""
HUB_TRAIN = (
    {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "streaming": True, "weight": 0.8},
    {"path": "emozilla/pg19", "streaming": True, "weight": 0.2},
)
"""web pages, and books: documents longer than the context"""
HUB_VALID = ({"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1", "split": "validation"},)


@dc.dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one host."""

    gpus: int
    gib: int
    """memory of each"""

    def __str__(self) -> str:
        return f"one GPU of {self.gib} GB" if self.gpus == 1 else f"{self.gpus} GPUs of {self.gib} GB"

    @property
    def launch(self) -> str:
        """What starts a run on it."""
        if self.gpus == 1:
            return "sse-convert"
        return f"accelerate launch --num_processes {self.gpus} --use_fsdp --fsdp_version 2 -m sse_convert"


MOST_GPUS = 8
"""that share the rows of a step"""
MACHINES = (*(Machine(1, gib) for gib in GPU_GIB), Machine(8, 80), Machine(8, 141))
"""that a recipe may name, smallest first"""


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
    train: tuple[dict[str, Any], ...] = HUB_TRAIN
    """sources of training text"""
    valid: tuple[dict[str, Any], ...] = HUB_VALID
    """held-out sources"""
    license: str | None = None
    note: str = ""
    """a line of the header"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class NewRecipe:
    """A recipe as text, and what it is for."""

    text: str
    recipe: Recipe
    machine: Machine
    fits: bool
    """whether the estimate fits the machine"""
    plan: Plan


def new_recipe(teacher: Teacher, wanted: Wanted, machine: Machine | None = None) -> NewRecipe:
    """The best known recipe for a model.

    Args:
        teacher: the opened model.
        wanted: names and text.
        machine: what it shall run on; None names the smallest that holds rows of full length.

    Raises:
        CheckpointError, RecipeError: the model cannot be converted.
    """
    recipe, data, machine, fits = _first_that_fits(teacher, wanted, machine)
    plan = make_plan(recipe, teacher=teacher)
    text = "\n".join([*_header(wanted, machine, fits, plan, teacher), *_body(data, plan, _speed(plan)), ""])
    return NewRecipe(text=text, recipe=recipe, machine=machine, fits=fits, plan=plan)


def write_new_recipe(
    model: str, to: Path, *, text: Sequence[Path | str], held_out: Sequence[Path | str], overwrite: bool
) -> TextReport:
    """Write the recipe of a model to a file. Arguments and errors as of `api.recipes_new`."""
    title = Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]
    target = recipe_target(to, title.lower(), overwrite=overwrite)
    wanted = Wanted(model=model, name=title.lower(), title=title, command=str(target))
    if text or held_out:
        valid = _text_sources(held_out) or ({"kind": "teacher"},)
        wanted = dc.replace(wanted, train=_text_sources(text) or HUB_TRAIN, valid=valid)
    here = machine_here()
    made = new_recipe(open_teacher(model), wanted, here)
    write_text(target, made.text)
    choice = made.plan.choice
    assert choice is not None
    lines = [f"wrote {target}: {choice.keep} of {len(choice.among)} layers to be chosen; needs {made.machine}"]
    if here is None:
        lines.append("there is no GPU here: the recipe is for the smallest machine that holds its rows")
    elif not made.fits:
        lines.append(f"warning: it does not fit {here} by the estimate of `plan`, even in rows of {SHORTEST_ROW}")
    data = {"path": str(target), "machine": dc.asdict(made.machine), "fits": made.fits, "text": made.text}
    return TextReport(data, [*lines, f"next: sse-convert plan {target}"])


def _text_sources(paths: Sequence[Path | str]) -> tuple[dict[str, Any], ...]:
    """Sources of a recipe.

    Raises:
        DataError: one is neither here nor a name that a hub could have.
    """
    found: list[dict[str, Any]] = []
    for path in map(str, paths):
        here = is_local(Source(path=path))
        if here and not Path(path).expanduser().exists():
            raise DataError(
                f"{path} does not exist",
                expected="a text file, a folder of them, or a hub dataset such as emozilla/pg19",
                fix="correct the path",
            )
        found.append({"path": path} if here else {"path": path, "streaming": True})
    return tuple(found)


def machine_here() -> Machine | None:
    """The GPUs of this host, None without any."""
    import torch

    count = min(MOST_GPUS, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(count, math.ceil(min(memory) / GIB)) if memory else None


def sizes_of(teacher: Teacher) -> ModelSizes:
    """What the rule reads of a model."""
    softmax = set(teacher.softmax_layers)
    return ModelSizes(
        width=teacher.dims.hidden,
        parameters=teacher.files.parameters,
        positions=teacher.text.max_position_embeddings,
        full=tuple(i in softmax and window is None for i, window in enumerate(teacher.windows)),
    )


def _first_that_fits(
    teacher: Teacher, wanted: Wanted, machine: Machine | None
) -> tuple[Recipe, dict[str, Any], Machine, bool]:
    """Rows as long as the machine holds, or the smallest machine that holds the longest rows."""
    sizes, longest = sizes_of(teacher), LONGEST_ROW
    data = _data(wanted, sizes, longest)
    recipe = recipe_from_dict(data, wanted.command)
    if machine is None:
        fitting = (one for one in MACHINES if _fits(recipe, teacher, one))
        machine = next(fitting, None)
        return recipe, data, machine or MACHINES[-1], machine is not None
    while not (fits := _fits(recipe, teacher, machine)) and longest > SHORTEST_ROW:
        longest //= 2
        data = _data(wanted, sizes, longest)
        recipe = recipe_from_dict(data, wanted.command)
    return recipe, data, machine, fits


def _fits(recipe: Recipe, teacher: Teacher, machine: Machine) -> bool:
    """Whether every stage fits by `plan`'s estimate, at one row and with gradient checkpointing."""
    names, mixers = resolve(draft_recipe(recipe, teacher.num_layers), teacher.num_layers)
    by_layer = [None if name == FULL else mixers[name] for name in names]
    geometry, room = geometry_of(teacher), machine.gib * GIB
    estimates = (
        stage_memory(
            geometry, by_layer, stage, lora=recipe.train.lora, bf16=True, checkpointing=True, cuda_graphs=False
        ).total(stage.seq_len, 1, room, Processes(machine.gpus, sharded=machine.gpus > 1))
        for stage in recipe.stages
    )
    return all(needed <= USABLE * room for needed in estimates)


def _data(wanted: Wanted, sizes: ModelSizes, longest: int) -> dict[str, Any]:
    """The recipe as plain data."""
    own, stages = measured(), recommended_stages(sizes, longest)
    lengths = [stage["seq_len"] for stage in stages]
    needles = {"share": own.data.needles.share, "keys": own.data.needles.keys}
    calibrated = min(own.calibrate.seq_len, sizes.positions)
    return {
        "recipe_version": 1,
        "model": wanted.model,
        "layers": recommended_layers(sizes.full),
        "mixers": {MIXER: recommended_mixer()},
        "calibrate": {"rows": own.calibrate.rows, "seq_len": calibrated},
        "stages": stages,
        "data": {"train": list(wanted.train), "valid": list(wanted.valid), "needles": needles},
        "eval": {"lengths": lengths, "tokens": 131072, "needle": {"lengths": lengths, "samples": 500}},
        "export": {"dir": f"out/{wanted.name}-sse", **({"license": wanted.license} if wanted.license else {})},
    }


def _header(wanted: Wanted, machine: Machine, fits: bool, plan: Plan, teacher: Teacher) -> list[str]:
    assert plan.choice is not None
    choice, speed = plan.choice, _speed(plan)
    flops = choice.flops + sum(stage.flops for stage in plan.stages)
    estimate = "" if fits else ", which is too small by the estimate of `plan`"
    kept = f"{choice.keep} of {len(choice.among)} layers stay softmax, chosen before training"
    lines = [
        f"{wanted.title}: {kept}; the others become SSE beside a window.",
        f"Plan:  sse-convert plan {wanted.command}",
        f"Run:   {machine.launch} run {wanted.command}",
        f"Takes: {machine}{estimate}; {_costs(flops, speed)}, by `plan`.",
        f"Measured, on a teacher of 32M parameters (recipe {MEASURED}): choosing layers, SSE beside a window, AdamW,",
        "       planted rows, two stages of KL.",
        f"By rule from there: rates by width ({MEASURED_WIDTH} to {teacher.dims.hidden}), tokens of a step, rows.",
        f"Not measured: this model, its share of layers, its text and tokens, state_heads: {STATE_HEADS}.",
        *([wanted.note] if wanted.note else []),
    ]
    return [f"# {line}" for line in lines]


def _body(data: dict[str, Any], plan: Plan, speed: float) -> list[str]:
    """The recipe's lines, one for each key of the first level or entry of a list, with costs behind them."""
    assert plan.choice is not None
    chosen, layers = plan.choice, data["layers"]
    return [
        f"recipe_version: {data['recipe_version']}",
        f"model: {format_flow([data['model']])[1:-1]}",
        "layers:",
        f"  pattern: {format_flow(layers['pattern'])}",
        f"  # {chosen.passes} forward passes over {chosen.tokens:,} tokens; {_costs(chosen.flops, speed)}",
        f"  select: {format_flow(layers['select'])}",
        "mixers:",
        *(f"  {name}: {format_flow(settings)}" for name, settings in data["mixers"].items()),
        f"calibrate: {_with_units(data['calibrate'])}",
        "stages:",
        *(line for stage, row in zip(data["stages"], plan.stages, strict=True) for line in _stage(stage, row, speed)),
        "data:",
        *(line for key in ("train", "valid") for line in _sources(key, data["data"][key])),
        f"  needles: {format_flow(data['data']['needles'])}",
        f"eval: {_with_units(data['eval'])}",
        f"export: {format_flow(data['export'])}",
    ]


def _stage(stage: dict[str, Any], row: StageRow, speed: float) -> list[str]:
    return [f"  # {row.steps:,} steps; {_costs(row.flops, speed)}", f"  - {_with_units(stage)}"]


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


def _speed(plan: Plan) -> float:
    return DENSE_SPEED if plan.active_parameters == plan.parameters else EXPERT_SPEED


def _costs(flops: float, speed: float) -> str:
    """`4.8e19 FLOPs, 33 GPU hours at 400 TFLOP/s`."""
    hours = flops / speed / 3600
    time = f"{hours:.2g} GPU hours" if hours >= 1 else f"{math.ceil(60 * hours)} GPU minutes"
    return f"{flops:.1e} FLOPs, {time} at {speed / 1e12:.0f} TFLOP/s".replace("e+", "e")
