"""A new recipe as text: what is said above it, and its lines with what they cost."""

from typing import Any

from sse_convert.checkpoints.teacher import Teacher
from sse_convert.recipe import Recipe
from sse_convert.recipe.recommended import MEASURED_SIZE, MIXER, STATE_HEADS, ModelSizes, budgets
from sse_convert.recipe.units import format_count
from sse_convert.report import format_flow, format_number, time_in_words
from sse_convert.surgery.costs_report import gpus_in_words, launch_command, least_memory
from sse_convert.surgery.memory import GIB
from sse_convert.surgery.plan_report import StageRow
from sse_convert.surgery.recipe_text import MOST_PASSES
from sse_convert.surgery.wanted_recipe import NewRecipe, Wanted, sizes_of


def recipe_header(wanted: Wanted, made: NewRecipe, teacher: Teacher) -> list[str]:
    """What the recipe does, how to run it, what it takes, and what was measured of it.

    Args:
        wanted: what was asked for.
        made: the recipe.
        teacher: the opened model.
    """
    assert made.plan.choice is not None
    choice, way, sizes = made.plan.choice, made.way, sizes_of(teacher, wanted.weight_size)
    measured = sizes.measured
    ruled = f"{_rates(sizes, read=wanted.weight_size is not None)}, tokens of a step, rows"
    ruled += ", window" * ("window" in made.data["mixers"].get(MIXER, {}))
    kept = f"{choice.keep} of {len(choice.among)} {choice.what} stay softmax, chosen before training"
    command = f"sse-convert run {wanted.command}"
    lines = [
        f"{wanted.title}: {kept}; all else becomes {'one state' if measured.by_heads else 'SSE'} beside a window.",
        f"Plan:  sse-convert plan {wanted.command}",
        f"Run:   {command if way is None else launch_command(way, command)}",
        *_takes(made),
        *_evidence(made.recipe, sizes),
        f"By rule from there: {ruled}.",
        f"Not measured: {_unmeasured(made.recipe, sizes)}.",
        *(line[0].upper() + line[1:] + "." for line in text_lines(wanted, made.recipe, teacher)),
        *([wanted.note] if wanted.note else []),
    ]
    return [f"# {line}" for line in lines]


def _rates(sizes: ModelSizes, *, read: bool) -> str:
    """What the rates follow from."""
    if not sizes.measured.by_heads:
        return f"rates by width ({sizes.measured.width} to {sizes.width})"
    unread = "" if read else ", the usual one: they were not read"
    return f"rates by the size of weights ({MEASURED_SIZE:g} to {sizes.weight_size:.2g}{unread})"


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


def text_lines(wanted: Wanted, recipe: Recipe, teacher: Teacher) -> list[str]:
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


def _takes(made: NewRecipe) -> list[str]:
    """The machine, how it is used, memory and time with that of a choice."""
    way, choice = made.way, made.plan.choice
    assert choice is not None
    if made.pace is not None:
        whole = made.pace.hours(made.data["stages"])
        beside = f"{time_in_words(made.pace.beside)} of that for choosing, calibrating and measuring"
        return [
            f"Takes: the CPU that it was written on, about {time_in_words(whole)}; {beside}.",
            "       Its products were timed for a moment, beside what else ran then.",
        ]
    if way is None:
        return ["Takes: more memory than the GPUs that it was written for have, by the estimate of `plan`."]
    how = "" if way.how == "as it is" else f" ({way.how})"
    least = least_memory(made.plan.costs, way)
    used = f"{way.bytes / GIB:.1f} GiB of each used" + f" where it has {way.gib}" * (way.gib > least.gib)
    time = _time(way.gpu_hours + choice.gpu_hours + way.gpus * way.beside)
    return [
        f"Takes: {gpus_in_words(least)}{how}, {used}; {time}.",
        "       GPU time is that of `plan`, if several GPUs lose nothing; below, with activations computed once.",
    ]


def recipe_body(made: NewRecipe) -> list[str]:
    """The recipe's lines, one for each key of the first level or entry of a list, with costs behind them."""
    data, plan, pace = made.data, made.plan, made.pace
    assert plan.choice is not None
    chosen, layers = plan.choice, data["layers"]
    if pace is None:
        choosing, times = _time(chosen.gpu_hours), [_time(cost.gpu_hours) for cost in plan.costs.stages]
    else:
        choosing = f"{time_in_words(chosen.cpu_hours or 0.0)} of this CPU"
        times = [f"{time_in_words(hours)} of this CPU" for hours in pace.stage_hours(data["stages"])]
    return [
        f"recipe_version: {data['recipe_version']}",
        f"model: {format_flow([data['model']])[1:-1]}",
        "layers:",
        f"  pattern: {format_flow(layers['pattern'])}",
        f"  # at most {chosen.passes} forward passes over {chosen.tokens:,} tokens; {choosing}",
        f"  select: {format_flow(layers['select'])}",
        *(["mixers:"] if data["mixers"] else []),
        *(f"  {name}: {format_flow(settings)}" for name, settings in data["mixers"].items()),
        f"calibrate: {_with_units(data['calibrate'])}",
        "stages:",
        *(line for parts in zip(data["stages"], plan.stages, times, strict=True) for line in _stage(*parts)),
        "data:",
        *(line for key in ("train", "valid") for line in _sources(key, data["data"][key])),
        *(f"  {key}: {format_flow(data['data'][key])}" for key in ("needles",) if key in data["data"]),
        f"eval: {_with_units(data['eval'])}",
        f"export: {format_flow(data['export'])}",
    ]


def _stage(stage: dict[str, Any], row: StageRow, time: str) -> list[str]:
    return [
        f"  # {row.steps:,} steps; {time}",
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
