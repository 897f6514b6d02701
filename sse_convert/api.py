"""What the commands do, as functions of the same names. Heavy imports happen inside; `import sse_convert.api` is quick."""

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sse_convert.doctor import DoctorReport, diagnose
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.jsonschema import json_schema
from sse_convert.recipe.loader import problems_error
from sse_convert.recipe.presets import copy_preset, preset_names, preset_path, preset_summary, preset_text
from sse_convert.report import TextReport, table


def version() -> str:
    """Version of the installed package."""
    return importlib.metadata.version("sse-convert")


def recipes_list() -> TextReport:
    """The packaged recipes, with what each is for."""
    names = preset_names()
    rows = [(name, preset_summary(name)) for name in names]
    return TextReport(
        {"recipes": [{"name": name, "summary": summary, "path": str(preset_path(name))} for name, summary in rows]},
        table(("recipe", "what it does"), rows),
    )


def recipes_show(name: str) -> TextReport:
    """The text of a packaged recipe.

    Raises:
        RecipeError: there is no such recipe.
    """
    text = preset_text(name)
    return TextReport({"name": name, "text": text}, text.splitlines())


def recipes_copy(name: str, to: Path, *, overwrite: bool = False) -> TextReport:
    """Copy a packaged recipe to a file or into a folder.

    Raises:
        RecipeError: there is no such recipe.
        OutputError: the target exists or cannot be written.
    """
    written = copy_preset(name, to, overwrite=overwrite)
    return TextReport({"path": str(written)}, [f"wrote {written}; next: sse-convert plan {written}"])


def recipes_schema() -> TextReport:
    """The JSON schema of recipes."""
    schema = json_schema()
    return TextReport(schema, json.dumps(schema, indent=2).splitlines())


def doctor() -> DoctorReport:
    """Versions, devices, backends and optional packages of this machine."""
    return diagnose()
