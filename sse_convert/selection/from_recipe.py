"""A selection as a recipe has it: `run` makes it so, and the command `select` where nothing else is asked for.

It is greedy for layers and by attention for heads, on training text, with rows as long as the recipe's. A CPU that
would take long measures less. Windows stand in for what layers become: untrained SSE says nothing of what trained SSE
will find.
"""

import dataclasses as dc

from sse_convert.checkpoints.load_model import context_limit, pick_device
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.mixers import SlidingMixer, WindowMixer
from sse_convert.recipe.choosing import ProbeRows, open_choice, probe_rows, rows_of
from sse_convert.recipe.schema import Recipe
from sse_convert.report import time_in_words
from sse_convert.selection.select import replacement
from sse_convert.selection.setup import SHORTEST_ROW, STAND_IN, WINDOWS, SelectSettings
from sse_convert.surgery.choice_cost import Effort, choice_effort, cpu_hours
from sse_convert.surgery.job import Job

TOLD = 1 / 60
"""hours of a CPU from which on they are told"""


def settings_for(
    job: Job,
    *,
    keep: int | None = None,
    tokens: int | None = None,
    length: int | None = None,
    samples: int | None = None,
    device: str | None = None,
) -> tuple[Job, SelectSettings]:
    """Settings of a selection, those that are None as the recipe has them, and the job with the recipe as it reads it.
    What takes this CPU a minute or more is said.

    Args:
        job: the recipe with or without `layers.select`.
        keep: layers to keep.
        tokens: running text to predict.
        length: tokens per row.
        samples: recall rows.
        device: that measures; a CPU that would take long measures less, where no length is asked for.

    Raises:
        UsageError: neither says how many layers to keep.
        RecipeError: `layers.select` does not fit the model.
    """
    teacher = job.teacher()
    choice = open_choice(_asking(job.recipe, None), teacher.num_layers, teacher.separable_heads)
    recipe = _asking(job.recipe, keep)
    by = "layers" if choice is None or recipe.layers.select is None else recipe.layers.select.by
    if keep is None and choice is not None:
        keep = choice.keep
    if keep is None:
        raise UsageError(
            "how many layers stay softmax attention is not said",
            expected="a number of layers, or a recipe with layers.select",
            fix="give --keep 2, or set layers: {pattern: [sse+sliding], select: {keep: 25%}} in the recipe",
        )
    place = pick_device(device)
    units = tuple(teacher.softmax_layers) if choice is None else choice.units
    effort = choice_effort(
        job.geometry(),
        probe_rows(recipe, context_limit(teacher.config)) if length is None else rows_of(length),
        by=by,
        keep=keep,
        among=len(units),
        cpu=length is None and place.type == "cpu",
    )
    rows = effort.rows
    if tokens is not None:
        rows = dc.replace(rows, text=max(1, tokens // max(1, rows.length)))
    if samples is not None:
        rows = dc.replace(rows, recall=samples)
    if place.type == "cpu":
        chosen = f"{keep} of {len(units)} {'layers' if by == 'layers' else 'key-value heads'}"
        _tell(chosen, dc.replace(effort, rows=rows), teacher)
    settings = SelectSettings(
        keep=keep,
        among=None if choice is None else choice.among,
        units=None if choice is None else choice.units,
        span=1 if choice is None else choice.span,
        method=effort.method,
        tries=effort.tries,
        light=effort.light,
        tokens=rows.text * rows.length if tokens is None else tokens,
        length=rows.length,
        samples=rows.recall,
    )
    return dc.replace(job, recipe=read_for_selection(recipe, rows)), settings


def _tell(chosen: str, effort: Effort, teacher: Teacher) -> None:
    """Say how long a choice on this CPU will take, if that is long."""
    if (hours := cpu_hours(effort, teacher.dtype)) >= TOLD:
        passes = f"at most {effort.sets} forward passes over {effort.rows.tokens:,} tokens"
        say(f"choosing {chosen}: {passes}, about {time_in_words(hours)} on this CPU")


def _asking(recipe: Recipe, keep: int | None) -> Recipe:
    """The recipe with nothing chosen in its `layers.select`, if it has one, and another number of layers there."""
    select = recipe.layers.select
    if select is None:
        return recipe
    select = dc.replace(select, keep=select.keep if keep is None else keep, chosen=None)
    return dc.replace(recipe, layers=dc.replace(recipe.layers, select=select))


def read_for_selection(recipe: Recipe, rows: ProbeRows) -> Recipe:
    """The recipe as a selection reads it: training text, so that held-out text decides nothing, and a stand-in as wide
    as the window beside SSE, at most a quarter of a row."""
    sources = recipe.data.train or recipe.data.valid
    recipe = dc.replace(recipe, data=dc.replace(recipe.data, valid=sources))
    mixers = recipe.known_mixers
    beside = mixers[replacement(recipe)]
    window = beside if isinstance(beside, WindowMixer) else mixers[STAND_IN]
    assert isinstance(window, WindowMixer)
    most = max(rows.length, SHORTEST_ROW) // WINDOWS
    sinks = min(window.sinks, most - 1)
    stand_in = SlidingMixer(window=min(window.window, most - sinks), sinks=sinks)
    return dc.replace(recipe, mixers={**recipe.mixers, STAND_IN: stand_in})
