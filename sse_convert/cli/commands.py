"""A command is made of a function of `sse_convert.api`: its parameters, defaults and docstring are those of the shell.

What a shell needs beyond that stands in the tables here: short flags, limits, other words.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from sse_convert import api
from sse_convert.files import text_from
from sse_convert.recipe.presets import preset_names
from sse_convert.recipe.ranges import PlainText, expanded
from sse_convert.report import Report


class Shorthand(NamedTuple):
    """An option that stands for `--set KEY=[NAMES]`."""

    key: str
    """of the recipe"""
    help: str

    def override(self, text: str) -> str:
        """The assignment that `--set` would be given, of names with commas."""
        return f"{self.key}=[{', '.join(name.strip() for name in text.split(','))}]"


def _recipe_names(incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


def _text_or_stdin(text: str) -> str:
    return text_from(sys.stdin.read, "standard input") if text == "-" else text


ARGUMENTS = ("repo_id", "prompt", "to")
"""parameters without a flag, as every function's first one"""
NEW_FILES = ("out",)
"""parameters that name what will be made; a temporary name beside it must be possible"""
MOST = 10**9
"""of any whole number"""
HUB_OR_FOLDER = ("recipe", "source", "checkpoint", "model", "teacher")
"""parameters that are not always a path"""
TEXTS = ("text", "held_out")
"""parameters that, where they take several, may name datasets of a hub: a slash at the end says that one is a folder"""
FLAGS = {
    "out": ("--out", "-o"),
    "checkpoint": ("--checkpoint", "-c"),
    "overrides": ("--set",),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recipe": {"help": "Recipe file, or a name from `recipes list`.", "autocompletion": _recipe_names},
    "name": {"autocompletion": _recipe_names},
    "source": {"metavar": "MODEL_OR_RECIPE"},
    "sources": {"metavar": "SOURCE"},
    "prompt": {"help": "Text to continue; `-` reads stdin.", "callback": _text_or_stdin},
    "overrides": {
        "metavar": "KEY=VALUE",
        "help": "Change a recipe value, for example stages.0.tokens=1M. Repeatable.",
    },
    "keep": {"min": 1},
    "max_new_tokens": {"min": 1},
    "seed": {"min": 0, "max": 2**32 - 1},
    "temperature": {"min": 0.0},
    "top_p": {"min": 0.0, "max": 1.0},
}
"""what typer is told of a parameter, in place of its line in the docstring or beside it"""


def shell_form(name: str, shorthands: dict[str, Shorthand]) -> Callable[..., Report]:
    """A function of the API with a signature that typer can read; what is not given keeps the API's default.

    Args:
        name: of the function; it is looked up when it is called.
        shorthands: options of the shell alone, by name.
    """
    function = getattr(api, name)
    summary, words = described(function)
    own = list(inspect.signature(function).parameters.values())
    parameters = [_parameter(own[0], words, argument=True)] if own else []
    parameters += [_parameter(p, words, argument=p.name in ARGUMENTS) for p in own[1:]]
    for key, short in shorthands.items():
        option = Annotated[str | None, typer.Option(f"--{key}", metavar="NAMES", help=short.help)]
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))

    def call(**given: Any) -> Report:
        said = {key: value for key, value in given.items() if value is not None}
        overrides = [short.override(said.pop(key)) for key, short in shorthands.items() if key in said]
        if shorthands:
            said["overrides"] = [*said.get("overrides", ()), *overrides]
        report: Report = getattr(api, name)(**said)
        return report

    call.__doc__ = summary
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def described(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and of each argument, as one line."""
    summary, *sections = re.split(r"\n\n(?=(?:Args|Raises|Returns):\n)", inspect.getdoc(function) or "")
    arguments = "".join(section for section in sections if section.startswith("Args:"))
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, flags=re.MULTILINE)
    return summary, {name: " ".join(text.split()) for name, text in found}


def _parameter(parameter: inspect.Parameter, words: dict[str, str], *, argument: bool) -> inspect.Parameter:
    name = parameter.name
    kind = shell_type(name, parameter.annotation)
    default = list(parameter.default) or None if isinstance(parameter.default, tuple) else parameter.default
    text = words.get(name, "")
    settings = {"help": text[:1].upper() + text[1:], **_limits(name, kind), **SETTINGS.get(name, {})}
    if argument:
        settings = {"metavar": name.upper(), **settings}
    if default is inspect.Parameter.empty:
        settings["show_default"] = False
    info = typer.Argument(**settings) if argument else typer.Option(*_flags(name, default), **settings)
    wanted = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[wanted, info])


def _limits(name: str, kind: Any) -> dict[str, Any]:
    """What every value of a type must be: whole numbers not endless, others finite, paths with `~` and variables
    expanded."""
    if kind is int:
        return {"max": MOST}
    if kind is float:
        return {"callback": _finite}
    if name in NEW_FILES:
        return {"callback": _new_path}
    if Path in (kind, *get_args(kind)) or name in (*HUB_OR_FOLDER, *TEXTS, "folder", "sources"):
        return {"callback": _expanded}
    return {}


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def _new_path(value: Any) -> Any:
    try:
        return value if value is None else type(value)(PlainText(path=True, siblings=True).read(str(value)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    try:
        return value if value is None else type(value)(expanded(str(value)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _flags(name: str, default: object) -> tuple[str, ...]:
    flag = f"--{name.replace('_', '-')}"
    return (f"{flag}/--no-{flag[2:]}",) if default is True else FLAGS.get(name, (flag,))


def shell_type(name: str, annotation: Any) -> Any:
    """What a shell can give of a parameter's type: text or a path where the API takes either, a list for a sequence."""
    kinds = [kind for kind in _members(annotation) if kind is not NoneType]
    if Path in kinds and name not in HUB_OR_FOLDER:
        return Path
    kind = str if str in kinds else kinds[0]
    if get_origin(kind) is not Sequence:
        return kind
    return GenericAlias(list, (str if name in TEXTS else shell_type(name, *get_args(kind)),))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
