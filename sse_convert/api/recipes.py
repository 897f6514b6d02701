"""Packaged recipes, and what every function takes for a recipe."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.choosing import is_open
from sse_convert.recipe.jsonschema import json_schema
from sse_convert.recipe.presets import copy_preset, preset_names, preset_path, preset_summary, preset_text
from sse_convert.report import TextReport, table

if TYPE_CHECKING:
    from sse_convert.surgery.job import Job

RecipeLike = Recipe | Path | str
"""a recipe, a recipe file, or the name of a packaged recipe"""


def recipes_list() -> TextReport:
    """The packaged recipes, with what each is for."""
    rows = [(name, preset_summary(name)) for name in preset_names()]
    return TextReport(
        {"recipes": [{"name": name, "summary": summary, "path": str(preset_path(name))} for name, summary in rows]},
        table(("recipe", "what it does"), rows),
    )


def recipes_show(name: str) -> TextReport:
    """The text of a packaged recipe.

    Args:
        name: as `recipes list` has it.

    Raises:
        RecipeError: there is no such recipe.
    """
    text = preset_text(name)
    return TextReport({"name": name, "text": text}, text.splitlines())


def recipes_copy(name: str, to: Path = Path("."), *, overwrite: bool = False) -> TextReport:
    """Copy a packaged recipe to a file or into a folder, to edit it.

    Args:
        name: as `recipes list` has it.
        to: file or folder.
        overwrite: replace an existing file.

    Raises:
        RecipeError: there is no such recipe.
        OutputError: the target exists or cannot be written.
    """
    written = copy_preset(name, to, overwrite=overwrite)
    return TextReport({"path": str(written)}, [f"wrote {written}; next: sse-convert plan {shlex.quote(str(written))}"])


def recipes_new(
    model: Path | str,
    to: Path = Path("."),
    *,
    text: Sequence[Path | str] = (),
    held_out: Sequence[Path | str] = (),
    hours: float | None = None,
    overwrite: bool = False,
) -> TextReport:
    """Write the best known recipe for a model: for its size, the GPUs or the CPU of this machine, and your text.

    Rates and steps follow the rule of the page *Why these recipes*; costs stand beside what has them.

    Args:
        model: folder or hub id.
        to: file or folder.
        text: training text: files, folders or hub datasets; without any, web pages and books of the hub.
        held_out: text to measure on; unset samples it from the model where `text` is given, else takes Wikipedia's.
        hours: that choosing, training and measuring may take on this machine. Unset: as long as the rule's tokens take,
            and 2 on a CPU.
        overwrite: replace an existing file.

    Raises:
        UsageError: the hours are too few for this machine.
        CheckpointError, HubError: the model cannot be read or converted.
        DataError: a text does not exist.
        OutputError: the target exists or cannot be written.
    """
    from sse_convert.surgery.new_recipe import write_new_recipe

    return write_new_recipe(str(model), to, text=text, held_out=held_out, hours=hours, overwrite=overwrite)


def recipes_schema() -> TextReport:
    """The JSON schema of recipes, for editors.

    Save it as recipe.schema.json and start a recipe with the line
    # yaml-language-server: $schema=recipe.schema.json
    """
    schema = json_schema()
    return TextReport(schema, json.dumps(schema, indent=2).splitlines())


def read_recipe(recipe: RecipeLike, overrides: Sequence[str] | None) -> Recipe:
    """The recipe itself. Arguments and errors as of `plan`."""
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe, list(overrides or ()))


def job_of(checkpoint: Path | str, recipe: RecipeLike, overrides: Sequence[str] | None) -> "Job":
    """The job of a checkpoint: what `layers.select` of the recipe chose is what the checkpoint keeps."""
    found = read_recipe(recipe, overrides)
    from sse_convert.surgery.compatibility import with_layers_of
    from sse_convert.surgery.job import Job

    return Job.of(with_layers_of(checkpoint, found) if is_open(found) else found)


def shell_command(recipe: RecipeLike, overrides: Sequence[str] | None) -> str:
    """What runs this recipe, for messages; what it is overridden with belongs to it."""
    origin = str(recipe) if isinstance(recipe, Path | str) else "RECIPE"
    sets = [part for text in overrides or () for part in ("--set", text)]
    return shlex.join(["sse-convert", "run", origin, *sets])
