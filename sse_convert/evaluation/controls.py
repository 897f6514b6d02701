"""Where a recipe's control runs are, which are asked for, and their figures beside the recipe's own."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.teacher import Teacher
from sse_convert.errors import UsageError
from sse_convert.evaluation.comparison import ControlRun, ControlTable
from sse_convert.recipe.controls import control_recipes
from sse_convert.recipe.schema import Recipe

EVALUATION = "evaluation.json"
"""report of an eval step"""
COMPARISON = "comparison.json"
"""the control table, in the folder of the controls"""


def stages_folder(out: str | Path) -> Path:
    """Where the steps of a run are whose result goes to `out`."""
    out = Path(out)
    return out.with_name(f"{out.name}.stages")


def chosen_controls(recipe: Recipe, teacher: Teacher) -> dict[str, Recipe]:
    """The recipes of the controls that a recipe asks for; `all` means all that it can have.

    Args:
        recipe: the main run.
        teacher: its model.

    Raises:
        UsageError: a control is asked for by name that the recipe cannot have.
        RecipeError: the recipe's layers do not fit the model.
    """
    if not recipe.controls:
        return {}
    known = _controls(recipe, teacher)
    possible = {name: control for name, control in known.items() if isinstance(control, Recipe)}
    for name in recipe.controls:
        if name != "all" and name not in possible:
            raise UsageError(
                f"control {name!r} is asked for: {known[name]}",
                expected=f"one of {', '.join(possible) or 'none'}",
                fix="leave it out of controls",
            )
    return {name: control for name, control in possible.items() if {"all", name} & set(recipe.controls)}


def control_table(recipe: Recipe, teacher: Teacher, figures: Mapping[str, Any], command: str) -> ControlTable:
    """The recipe's figures beside those of its controls, as far as they have been run.

    Args:
        recipe: the main run.
        teacher: its model.
        figures: `EvalReport.to_dict()` of the main run.
        command: what started it.
    """
    return ControlTable(main=figures, runs=tuple(_runs(_controls(recipe, teacher), command)))


def _controls(recipe: Recipe, teacher: Teacher) -> dict[str, Recipe | str]:
    return control_recipes(recipe, teacher.num_layers, teacher.text.max_position_embeddings)


def _runs(controls: Mapping[str, Recipe | str], command: str) -> Iterator[ControlRun]:
    for name, control in controls.items():
        if isinstance(control, str):
            yield ControlRun(name=name, status="none", note=control)
            continue
        folder = stages_folder(control.export.dir)
        found = sorted(folder.glob(f"*-eval/{EVALUATION}"))
        if found:
            report = json.loads(found[-1].read_text(encoding="utf-8"))
            yield ControlRun(name=name, status="measured", note=str(folder), report=report)
        else:
            yield ControlRun(name=name, status="not run", note=f"{command} --controls {shlex.quote(name)}")
