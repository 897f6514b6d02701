"""The choice that `layers.select` of a recipe asks for, made before anything else of a run."""

import dataclasses as dc
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from sse_convert.checkpoints.load_model import context_limit
from sse_convert.console import say
from sse_convert.data.rows import text_digests
from sse_convert.recipe.choosing import METHODS, chosen_recipe, open_choice, probe_rows
from sse_convert.selection.from_recipe import read_for_selection, settings_for
from sse_convert.selection.select import select_layers
from sse_convert.selection.selection_report import SelectReport
from sse_convert.selection.setup import STAND_IN
from sse_convert.selection.team import ALONE, Team
from sse_convert.surgery.job import Job
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


def choose_layers(job: Job, out: Path, team: Team = ALONE, *, try_teacher: bool = False) -> LayerChoice:
    """Choose what the recipe leaves open; an interrupted choice into the same folder is continued.

    Args:
        job: the recipe with `layers.select`.
        out: folder for scores and report.
        team: processes that share the work; every one must call it.
        try_teacher: see `select_layers`.

    Raises:
        DataError, TrainingError, CheckpointError, OutputError, HardwareError: as of `api.select`.
    """
    probed, settings = settings_for(job)
    report = select_layers(probed, out, settings, team=team, try_teacher=try_teacher)
    clear_device_cache(garbage_collection=True)  # the model is in cycles, and training wants its memory
    return LayerChoice(report)


def choose_for_conversion(job: Job, out: Path) -> Job:
    """The job with its choice made, in a folder beside that of the conversion.

    Args:
        job: the recipe with `layers.select`, and nothing chosen.
        out: folder that the model will be converted into; the choice goes to `<out>.select`.

    Raises:
        SSEConvertError: as of `choose_layers`, and if the recipe does not fit the model.
    """
    recipe, teacher = job.recipe, job.teacher()
    make_plan(job)
    found = choose_layers(job, out.with_name(f"{out.name}.select"), try_teacher=True)
    for line in found.lines():
        say(line)
    choice = open_choice(recipe, teacher.num_layers, teacher.separable_heads)
    return dc.replace(job, recipe=chosen_recipe(recipe, found.kept, choice))


def choice_inputs(job: Job) -> dict[str, Any]:
    """All that a choice depends on."""
    recipe = job.recipe
    assert recipe.layers.select is not None
    probe = read_for_selection(recipe, rows := probe_rows(recipe, context_limit(job.teacher().config)))
    return {
        "model": job.identity,
        "layers": dc.asdict(recipe.layers),
        "stand_in": dc.asdict(probe.mixers[STAND_IN]),
        "method": METHODS[recipe.layers.select.by],
        "rows": dc.asdict(rows),
        "data": {
            "train": dc.asdict(probe.data)["valid"],
            "seed": recipe.data.seed,
            "words": recipe.data.needles.words,
        },
        "text": text_digests(probe.data.valid),
    }
