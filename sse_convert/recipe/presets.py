"""The recipes that come with sse-convert: `recipes/` in a checkout, `sse_convert/recipes/` in an installed package."""

import re
import shlex
import shutil
from difflib import get_close_matches
from pathlib import Path

from sse_convert.errors import OutputError, RecipeError
from sse_convert.files import check_writable, replacing

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.yaml)(?<!\.yml)")


def presets_folder() -> Path:
    """Where the packaged recipes are."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def preset_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    return sorted(file.stem for file in presets_folder().glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The file of a packaged recipe, named with or without `.yaml`.

    Raises:
        RecipeError: there is no such file and no such recipe.
    """
    known = preset_names()
    stem = name.removesuffix(".yaml")
    if stem in known:
        return presets_folder() / f"{stem}.yaml"
    near = get_close_matches(stem.rpartition("/")[2].lower(), known, 1)
    fix = f"did you mean {near[0]}?" if near else "see `sse-convert recipes list`"
    if _HUB_ID.fullmatch(name):
        fix += f" If it is a model, {new_recipe_command(name)}"
    raise RecipeError(
        f"recipe {name!r} does not exist", expected="a YAML file, or the name of a packaged recipe", fix=fix
    )


def new_recipe_command(model: Path | str) -> str:
    """What to do with a model where a recipe is wanted."""
    return f"write a recipe for it: sse-convert recipes new {shlex.quote(str(model))}"


def preset_text(name: str) -> str:
    """The text of a packaged recipe, comments included."""
    return preset_path(name).read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """The first comment line of a packaged recipe."""
    first = preset_text(name).partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def recipe_target(to: Path, name: str, *, overwrite: bool) -> Path:
    """The file that a recipe goes to.

    Args:
        to: this file, or a folder that exists.
        name: of the recipe, for a folder.
        overwrite: it may exist.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    target = to / f"{name}.yaml" if to.is_dir() else to
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists", expected="a new file", fix="choose another name, or pass --overwrite")
    check_writable(target)
    return target


def copy_preset(name: str, to: Path, *, overwrite: bool = False) -> Path:
    """Copy a packaged recipe to a file or into a folder; returns the file written.

    Raises:
        RecipeError: unknown name.
        OutputError: the file exists or cannot be written.
    """
    source = preset_path(name)
    target = recipe_target(to, source.stem, overwrite=overwrite)
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
    return target
