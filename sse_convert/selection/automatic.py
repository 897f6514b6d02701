"""The choice that `layers.select` of a recipe asks for: greedy, on training text, with rows as long as the recipe's.

Windows stand in for what layers become: untrained SSE says nothing of what trained SSE will find.
"""

import dataclasses as dc
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.output_folder import check_output
from sse_convert.checkpoints.teacher import Teacher, open_teacher
from sse_convert.console import say
from sse_convert.data.rows import text_digests
from sse_convert.errors import DataError
from sse_convert.mixers import SlidingMixer, WindowMixer
from sse_convert.recipe.choosing import METHOD, ProbeRows, chosen_recipe, open_choice, probe_rows
from sse_convert.recipe.pattern import OpenChoice
from sse_convert.recipe.schema import Recipe
from sse_convert.selection.select import replacement, select_layers
from sse_convert.selection.selection_report import SelectReport
from sse_convert.selection.setup import WINDOWS, SelectSettings, known_mixers
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


def choose_layers(recipe: Recipe, out: Path, teacher: Teacher, choice: OpenChoice, team: Team = ALONE) -> LayerChoice:
    """Choose what the recipe leaves open; an interrupted choice into the same folder is continued.

    Args:
        recipe: with `layers.select`.
        out: folder for scores and report.
        teacher: the recipe's model.
        choice: what is open.
        team: processes that share the work; every one must call it.

    Raises:
        DataError, TrainingError, CheckpointError, OutputError, HardwareError: as of `api.select`.
    """
    rows = probe_rows(recipe, context_limit(teacher.config))
    settings = SelectSettings(
        keep=choice.keep,
        among=choice.among,
        methods=(METHOD,),
        stand_in=STAND_IN,
        tokens=rows.text * rows.length,
        length=rows.length,
        samples=rows.recall,
    )
    report = select_layers(_with_probe(recipe, rows), out, settings, teacher=teacher, team=team)
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
    choice = open_choice(recipe, teacher.num_layers)
    assert choice is not None
    found = choose_layers(recipe, out.with_name(f"{out.name}.select"), teacher, choice)
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


def _with_probe(recipe: Recipe, rows: ProbeRows) -> Recipe:
    """The recipe as `select` reads it: training text, so that held-out text decides nothing, and the stand-in."""
    sources = recipe.data.train or recipe.data.valid
    if not sources:
        raise DataError(
            "there is no text to choose layers by, and layers.select asks for a choice",
            expected="data.train in the recipe",
            fix="add a source, or name the layers in layers.select.chosen",
        )
    mixers = known_mixers(recipe)
    beside = mixers[replacement(recipe)]
    window = beside if isinstance(beside, WindowMixer) else mixers[STAND_IN]
    assert isinstance(window, WindowMixer)
    sinks = min(window.sinks, rows.length // WINDOWS - 1)
    stand_in = SlidingMixer(window=min(window.window, rows.length // WINDOWS - sinks), sinks=sinks)
    return dc.replace(recipe, mixers={**recipe.mixers, STAND_IN: stand_in}, data=dc.replace(recipe.data, valid=sources))
