"""The choice as a recipe has it: `run` makes it so, and the command `select` where nothing else is asked for.

It is greedy, on training text, with rows as long as the recipe's. Windows stand in for what layers become: untrained
SSE says nothing of what trained SSE will find.
"""

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.output_folder import check_output
from sse_convert.checkpoints.teacher import Teacher, open_teacher
from sse_convert.console import say
from sse_convert.data.rows import text_digests
from sse_convert.errors import UsageError
from sse_convert.mixers import FULL, SlidingMixer, WindowMixer
from sse_convert.recipe.choosing import METHOD, TEXT_TOKENS, ProbeRows, chosen_recipe, probe_rows
from sse_convert.recipe.pattern import choice_of, expand_pattern
from sse_convert.recipe.schema import Recipe
from sse_convert.selection.select import replacement, select_layers
from sse_convert.selection.selection_report import SelectReport
from sse_convert.selection.setup import SHORTEST_ROW, WINDOWS, SelectSettings, known_mixers
from sse_convert.selection.team import ALONE, Team
from sse_convert.surgery.plan import make_plan

STAND_IN = "sliding"


@dc.dataclass(frozen=True, slots=True)
class LayerChoice:
    """Layers that were chosen for a recipe, as a step of a run reports them."""

    selection: SelectReport

    @property
    def kept(self) -> tuple[int, ...]:
        """Layers that stay softmax."""
        return self.selection.chosen.kept

    def to_dict(self) -> dict[str, Any]:
        """The selection as plain data."""
        return self.selection.to_dict()

    def lines(self) -> list[str]:
        """The selection for a person, without a next command."""
        return self.selection.found_lines()


def choose_layers(recipe: Recipe, out: Path, teacher: Teacher, team: Team = ALONE) -> LayerChoice:
    """Choose what the recipe leaves open; an interrupted choice into the same folder is continued.

    Args:
        recipe: with `layers.select`.
        out: folder for scores and report.
        teacher: the recipe's model.
        team: processes that share the work; every one must call it.

    Raises:
        DataError, TrainingError, CheckpointError, OutputError, HardwareError: as of `api.select`.
    """
    probed, settings = settings_for(recipe, teacher)
    report = select_layers(probed, out, settings, teacher=teacher, team=team)
    clear_device_cache(garbage_collection=True)  # the model is in cycles, and training wants its memory
    return LayerChoice(report)


def choose_for_conversion(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with its choice made, in a folder beside that of the conversion.

    Args:
        recipe: with `layers.select`, and nothing chosen.
        out: folder that the model will be converted into; the choice goes to `<out>.select`.

    Raises:
        SSEConvertError: as of `choose_layers`, and if the recipe does not fit the model or `out` cannot be made.
    """
    check_output(out)
    teacher = open_teacher(recipe.model, recipe.revision)
    make_plan(recipe, teacher=teacher)
    found = choose_layers(recipe, out.with_name(f"{out.name}.select"), teacher)
    for line in found.lines():
        say(line)
    return chosen_recipe(recipe, found.kept)


def choice_inputs(recipe: Recipe, teacher: Teacher) -> dict[str, Any]:
    """All that a choice depends on."""
    probe = _with_probe(recipe, rows := probe_rows(recipe, context_limit(teacher.config)))
    return {
        "model": checkpoint_identity(recipe.model, recipe.revision),
        "layers": dc.asdict(recipe.layers),
        "stand_in": dc.asdict(probe.mixers[STAND_IN]),
        "method": METHOD,
        "rows": dc.asdict(rows),
        "data": {
            "train": [dc.asdict(source) for source in probe.data.valid],
            "seed": recipe.data.seed,
            "words": recipe.data.needles.words,
        },
        "text": text_digests(probe.data.valid),
    }


def settings_for(
    recipe: Recipe,
    teacher: Teacher,
    *,
    keep: int | None = None,
    methods: Sequence[str] = (METHOD,),
    stand_in: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    samples: int | None = None,
    recall_weight: float = 1.0,
) -> tuple[Recipe, SelectSettings]:
    """Settings of a selection, those that are None as the recipe has them, and the recipe as it reads them.

    Args:
        recipe: with or without `layers.select`.
        teacher: the recipe's model.
        keep: layers to keep.
        methods: the first that can be used decides.
        stand_in: mixer that replaces layers while choosing.
        tokens: running text to predict.
        length: tokens per row.
        samples: recall rows.
        recall_weight: recall beside text, both in nats per token.

    Raises:
        UsageError: neither says how many layers to keep.
        RecipeError: `layers.select` does not fit the model.
    """
    select, among = recipe.layers.select, None
    if select is not None:
        names = expand_pattern(recipe.layers, known_mixers(recipe), teacher.num_layers)
        among = tuple(i for i, name in enumerate(names) if name != FULL)
        select = dc.replace(select, keep=select.keep if keep is None else keep, chosen=None)
        keep = choice_of(select, names).keep if keep is None else keep
        recipe = dc.replace(recipe, layers=dc.replace(recipe.layers, select=select))
    if keep is None:
        raise UsageError(
            "how many layers stay softmax attention is not said",
            expected="a number of layers, or a recipe with layers.select",
            fix="give --keep 2, or set layers: {pattern: [sse+sliding], select: {keep: 25%}} in the recipe",
        )
    rows = probe_rows(recipe, context_limit(teacher.config))
    if length is not None:
        rows = dc.replace(rows, length=length, text=max(1, TEXT_TOKENS // max(1, length)))
    settings = SelectSettings(
        keep=keep,
        among=among,
        methods=tuple(methods),
        stand_in=stand_in or STAND_IN,
        tokens=rows.text * rows.length if tokens is None else tokens,
        length=rows.length,
        samples=rows.recall if samples is None else samples,
        recall_weight=recall_weight,
    )
    return _with_probe(recipe, rows, windows=stand_in is None), settings


def _with_probe(recipe: Recipe, rows: ProbeRows, *, windows: bool = True) -> Recipe:
    """The recipe as a selection reads it: training text, so that held-out text decides nothing, and with `windows` a
    stand-in as wide as the window beside SSE, at most a quarter of a row."""
    sources = recipe.data.train or recipe.data.valid
    recipe = dc.replace(recipe, data=dc.replace(recipe.data, valid=sources))
    if not windows or rows.length < SHORTEST_ROW:
        return recipe
    mixers = known_mixers(recipe)
    beside = mixers[replacement(recipe)]
    window = beside if isinstance(beside, WindowMixer) else mixers[STAND_IN]
    assert isinstance(window, WindowMixer)
    sinks = min(window.sinks, rows.length // WINDOWS - 1)
    stand_in = SlidingMixer(window=min(window.window, rows.length // WINDOWS - sinks), sinks=sinks)
    return dc.replace(recipe, mixers={**recipe.mixers, STAND_IN: stand_in})
