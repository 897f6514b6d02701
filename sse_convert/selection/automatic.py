"""The choice that `layers.select` of a recipe asks for, made before anything else of a run."""

import dataclasses as dc
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.console import say
from sse_convert.data.rows import text_digests
from sse_convert.recipe.choosing import METHODS, chosen_recipe, open_choice, probe_rows
from sse_convert.recipe.schema import Recipe
from sse_convert.selection.from_recipe import read_for_selection, settings_for
from sse_convert.selection.select import select_layers
from sse_convert.selection.selection_report import SelectReport
from sse_convert.selection.setup import STAND_IN
from sse_convert.selection.team import ALONE, Team
from sse_convert.surgery.plan import make_plan


@dc.dataclass(frozen=True, slots=True)
class LayerChoice:
    """Layers that were chosen for a recipe, as a step of a run reports them."""

    selection: SelectReport

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of what stays softmax."""
        return self.selection.chosen.kept

    def to_dict(self) -> dict[str, Any]:
        """The selection as plain data."""
        return self.selection.to_dict()

    def lines(self) -> list[str]:
        """The selection for a person, without a next command."""
        return self.selection.found_lines()


def choose_layers(
    recipe: Recipe, out: Path, teacher: Teacher, team: Team = ALONE, *, try_teacher: bool = False
) -> LayerChoice:
    """Choose what the recipe leaves open; an interrupted choice into the same folder is continued.

    Args:
        recipe: with `layers.select`.
        out: folder for scores and report.
        teacher: the recipe's model.
        team: processes that share the work; every one must call it.
        try_teacher: see `select_layers`.

    Raises:
        DataError, TrainingError, CheckpointError, OutputError, HardwareError: as of `api.select`.
    """
    probed, settings = settings_for(recipe, teacher)
    report = select_layers(probed, out, settings, teacher=teacher, team=team, try_teacher=try_teacher)
    clear_device_cache(garbage_collection=True)  # the model is in cycles, and training wants its memory
    return LayerChoice(report)


def choose_for_conversion(recipe: Recipe, out: Path, teacher: Teacher) -> Recipe:
    """The recipe with its choice made, in a folder beside that of the conversion.

    Args:
        recipe: with `layers.select`, and nothing chosen.
        out: folder that the model will be converted into; the choice goes to `<out>.select`.
        teacher: the recipe's model.

    Raises:
        SSEConvertError: as of `choose_layers`, and if the recipe does not fit the model.
    """
    make_plan(recipe, teacher=teacher)
    found = choose_layers(recipe, out.with_name(f"{out.name}.select"), teacher, try_teacher=True)
    for line in found.lines():
        say(line)
    return chosen_recipe(recipe, found.kept, open_choice(recipe, teacher.num_layers, teacher.separable_heads))


def choice_inputs(recipe: Recipe, teacher: Teacher) -> dict[str, Any]:
    """All that a choice depends on."""
    assert recipe.layers.select is not None
    probe = read_for_selection(recipe, rows := probe_rows(recipe, context_limit(teacher.config)))
    return {
        "model": checkpoint_identity(recipe.model, recipe.revision),
        "layers": dc.asdict(recipe.layers),
        "stand_in": dc.asdict(probe.mixers[STAND_IN]),
        "method": METHODS[recipe.layers.select.by],
        "rows": dc.asdict(rows),
        "data": {
            "train": [dc.asdict(source) for source in probe.data.valid],
            "seed": recipe.data.seed,
            "words": recipe.data.needles.words,
        },
        "text": text_digests(probe.data.valid),
    }
