"""A recipe file to a checked `Recipe`: strict, all problems at once with their lines, nothing downloaded."""

import hashlib
import json
from pathlib import Path as FilePath
from typing import Any

from sse_convert.errors import RecipeError
from sse_convert.recipe.build import build_fields
from sse_convert.recipe.checks import check, check_together
from sse_convert.recipe.overrides import apply_overrides
from sse_convert.recipe.presets import new_recipe_command, preset_names, preset_path
from sse_convert.recipe.problems import Path, Problem, location
from sse_convert.recipe.schema import Recipe
from sse_convert.recipe.source import MOST_CHARACTERS, parse
from sse_convert.recipe.units import parse_count
from sse_convert.report import counted, json_ready

DEFAULT_BATCH_TOKENS = 65536


def load_recipe(path: FilePath | str, overrides: list[str] | None = None) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: a YAML file, or the name of a packaged recipe (`sse-convert recipes list`).
        overrides: `a.b=c` assignments, applied in order before anything is checked.

    Raises:
        RecipeError: the file is missing, not YAML, or has problems (all of them are listed, with lines).
        UsageError: an override cannot be applied.
    """
    file = _find(path)
    written, lines = parse(_read(file), str(path))
    written = {} if written is None else written
    data, sets = apply_overrides(written, overrides or [])
    if isinstance(data, dict) and "model_type" in data and "model" not in data:
        what = f"{path} is the configuration of a model"
        raise RecipeError(what, expected="a recipe file (YAML)", fix=new_recipe_command(file.parent))
    recipe, problems = _built(data)
    if recipe is None:
        raise problems_error(str(path), problems, lines, sets, _causes(written, overrides or []))
    return recipe


def recipe_or_model(source: FilePath | str, overrides: list[str] | None = None) -> Recipe:
    """`load_recipe` for a YAML file or a packaged name; for any other source, a recipe that only names it as the model.

    Args:
        source: recipe, or the folder or hub id of a model.
        overrides: `a.b=c` assignments.

    Raises:
        RecipeError, UsageError: see `load_recipe`.
    """
    file = FilePath(source)
    if file.suffix in (".yaml", ".yml") or file.is_file() or str(source) in preset_names():
        return load_recipe(source, overrides)
    bare = {"recipe_version": 1, "model": str(source), "layers": {"pattern": ["sse+sliding"]}, "export": {"dir": "out"}}
    data, sets = apply_overrides(bare, overrides or [])
    return _checked(data, f"{source} without a recipe", sets)


def recipe_from_dict(data: dict[str, Any], origin: str = "recipe") -> Recipe:
    """The recipe that `Recipe.to_dict` gave, for example the one in a checkpoint's config.json.

    Raises:
        RecipeError: it has problems.
    """
    return _checked(data, origin)


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of the resolved recipe. Equal for recipes that mean the same, whatever their spelling or key order."""
    return hashlib.sha256(json.dumps(json_ready(recipe.to_dict()), sort_keys=True).encode()).hexdigest()


def _find(path: FilePath | str) -> FilePath:
    """The file itself, else the packaged recipe of that name."""
    file = FilePath(path)
    if file.is_file():
        return file
    if file.is_dir():
        fix = new_recipe_command(path) if (file / "config.json").is_file() else "name the .yaml file in it"
        raise RecipeError(f"{path} is a folder", expected="a recipe file (YAML)", fix=fix)
    if file.exists():
        raise RecipeError(
            f"{path} is no regular file", expected="a recipe file (YAML)", fix="write the recipe to a file first"
        )
    return preset_path(str(path))


def _read(file: FilePath) -> str:
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not UTF-8 text (byte {error.start})", expected="a YAML file in UTF-8") from error
    except OSError as error:
        raise RecipeError(
            f"{file} cannot be read: {error.strerror}", fix="check the path and its permissions"
        ) from error


def _checked(data: Any, origin: str, sets: dict[Path, str] | None = None) -> Recipe:
    """The recipe that no file holds; raise with every problem found."""
    recipe, problems = _built(data)
    if recipe is None:
        raise problems_error(origin, problems, sets=sets)
    return recipe


def _built(data: Any) -> tuple[Recipe | None, list[Problem]]:
    """Build the dataclasses, then look for what makes no sense: the recipe, or every problem found."""
    problems: list[Problem] = []
    parts = build_fields(Recipe, _with_defaults(data), (), problems)
    problems += check_together(parts)
    if problems:
        return None, problems
    recipe = Recipe(**parts)
    problems += check(recipe)
    return (None if problems else recipe), problems


def _causes(data: Any, overrides: list[str]) -> dict[Path, str]:
    """By place, the override with which a problem came up there; none that ended another, which may have hidden it."""
    causes: dict[Path, str] = {}
    before = {problem.path for problem in _built(data)[1]}
    for override in overrides:
        data, landed = apply_overrides(data, [override])
        now = {problem.path for problem in _built(data)[1]}
        if before <= now:
            causes |= dict.fromkeys(now - before, *landed.values())
        before = now
    return causes


def problems_error(
    origin: str,
    problems: list[Problem],
    lines: dict[Path, int] | None = None,
    sets: dict[Path, str] | None = None,
    causes: dict[Path, str] | None = None,
) -> RecipeError:
    """One error that lists all problems in the order of the file.

    Args:
        origin: what was read.
        problems: all of them.
        lines: of the file, by place.
        sets: overrides by the place where they landed.
        causes: overrides by the place of a problem that came up with them.
    """
    lines, sets, causes = lines or {}, sets or {}, causes or {}
    messages = []
    for problem in sorted(problems, key=lambda problem: _order(problem.path, lines)):
        where = location(problem.path, lines, sets, causes)
        messages.append(f"{where}: {problem.message}" if where else problem.message)
    return RecipeError(
        "\n  ".join([f"{origin}: {counted(len(messages), 'problem')} in the recipe", *messages]),
        fix="`sse-convert recipes schema` describes every key, `sse-convert recipes show NAME` prints a working recipe",
        problems=messages,
    )


def _order(path: Path, lines: dict[Path, int]) -> int:
    """The line a problem belongs to: its own, or that of the nearest enclosing key."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 0)


def _with_defaults(data: Any) -> Any:
    """Fill in the stage defaults that depend on other keys: `train` for layer_mse, and whole rows in `batch_tokens`."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), list):
        return data
    return {**data, "stages": [_stage_defaults(stage) for stage in data["stages"]]}


def _stage_defaults(stage: Any) -> Any:
    if not isinstance(stage, dict):
        return stage
    filled = dict(stage)
    if stage.get("loss") == "layer_mse":
        filled.setdefault("train", "mixers")
    rows = stage.get("micro_batch", "auto")
    row = _count(stage.get("seq_len")) * (1 if rows == "auto" else _count(rows))
    if row > 0:
        filled.setdefault("batch_tokens", -(-DEFAULT_BATCH_TOKENS // row) * row)
    return filled


def _count(value: Any) -> int:
    """A count as written in YAML; 0 for what is not one (the builder reports it)."""
    if isinstance(value, str):
        return parse_count(value) or 0
    return value if type(value) is int else 0
