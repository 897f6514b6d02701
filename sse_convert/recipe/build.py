"""Plain data to frozen dataclasses, driven by their annotations; collects every problem instead of stopping at one."""

import dataclasses as dc
import types
import typing
from collections.abc import Collection
from difflib import get_close_matches
from typing import Annotated, Any

from sse_convert.mixers import BASIC, BUILT_IN, BY_LAYER, FULL, Mixer, SSEMixer
from sse_convert.mixers import RETIRED as RETIRED_OF_MIXERS
from sse_convert.recipe.checks import check
from sse_convert.recipe.problems import Path, Problem, shortened, suggest
from sse_convert.recipe.ranges import REAL, WHOLE, PlainText, Range, number_text
from sse_convert.recipe.retired import DEFAULTS, RETIRED
from sse_convert.recipe.units import parse_count, spelled_float

_MISSING = object()
Rule = Range | PlainText | None
_RULES: dict[Any, Rule] = {int: WHOLE, float: REAL, str: PlainText()}
"""of plain values whose annotation names none"""
FOR_EXPERTS = tuple(field.name for field in dc.fields(SSEMixer) if field.name not in BASIC)
"""settings of a mixer that stand under its `advanced`"""


def describe(value: Any) -> str:
    """A value as a recipe's author sees it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"text {shortened(value)!r}"
        case int() | float():
            return f"number {number_text(value)}"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"{type(value).__name__} {shortened(str(value))}"


def build(annotation: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    """`value` as an instance of `annotation`; what does not fit is appended to `problems` and comes back as None."""
    origin = typing.get_origin(annotation)
    if annotation == Mixer:
        return _build_mixer(value, path, problems)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(annotation), value, path, problems)
    if origin is typing.Literal:
        return _build_literal(typing.get_args(annotation), value, path, problems)
    if origin is list:
        return _build_list(typing.get_args(annotation)[0], value, path, problems)
    if origin is dict:
        return _build_dict(typing.get_args(annotation), value, path, problems)
    if dc.is_dataclass(annotation) and isinstance(annotation, type):
        return build_dataclass(annotation, value, path, problems)
    if origin is Annotated:
        kind, rule = typing.get_args(annotation)
        return _build_scalar(kind, rule, value, path, problems)
    return _build_scalar(annotation, _RULES.get(annotation), value, path, problems)


def build_dataclass(cls: type[Any], value: Any, path: Path, problems: list[Problem]) -> Any:
    """A dataclass from a mapping: unknown keys, missing keys and values that make no sense are all reported."""
    before = len(problems)
    arguments = build_fields(cls, value, path, problems)
    if len(problems) > before:
        return None
    try:
        built = cls(**arguments)
    except ValueError as error:  # from __post_init__
        problems.extend(Problem(path, message) for message in str(error).split("; "))
        return None
    problems.extend(Problem((*path, *problem.path), problem.message) for problem in check(built))
    return built


def _instead(path: Path, key: str) -> str:
    """What becomes of a key that stood here once, or stands elsewhere; empty for any other."""
    if path[:1] == ("mixers",) and key in RETIRED_OF_MIXERS:
        return f"was retired, layers have {describe(RETIRED_OF_MIXERS[key])}; remove it"
    if instead := RETIRED.get(".".join(map(str, (*path[:1], key)))):
        return f"was retired; {instead}"
    if len(path) == 2 and path[0] == "mixers" and key in FOR_EXPERTS:
        return f"belongs to mixers.{path[1]}.advanced"
    return ""


def _never_set(path: Path, key: str, value: Any) -> bool:
    """Whether a retired key has the value it had where nobody set it, as recipes that were written out have it."""
    was = DEFAULTS.get(key, _MISSING)
    return bool(_instead(path, key)) and type(value) is type(was) and value == was


def build_fields(
    cls: type[Any], value: Any, path: Path, problems: list[Problem], names: Collection[str] | None = None
) -> dict[str, Any]:
    """The constructor arguments of `cls` from a mapping; what could not be built is None and reported.

    Args:
        cls: a dataclass.
        value: the mapping.
        path: where it is.
        problems: what is wrong is added.
        names: fields that may be given here; None for all.
    """
    if not isinstance(value, dict):
        problems.append(Problem(path, f"expected a mapping (key: value), got {describe(value)}"))
        return {}
    annotations = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dc.fields(cls) if names is None or field.name in names}
    for key in (key for key in value.keys() - fields.keys() if not _never_set(path, key, value[key])):
        problems.append(Problem((*path, key), _instead(path, key) or "unknown key" + suggest(key, fields)))
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = build(annotations[name], value[name], (*path, name), problems)
        elif field.default is dc.MISSING and field.default_factory is dc.MISSING:
            problems.append(Problem((*path, name), "required key is missing"))
    return arguments


def _build_union(options: tuple[Any, ...], value: Any, path: Path, problems: list[Problem]) -> Any:
    """None where allowed, else the first option that fits."""
    if value is None and type(None) in options:
        return None
    classes = [option for option in options if dc.is_dataclass(option)]
    others = [option for option in options if option is not type(None) and option not in classes]
    if classes and (isinstance(value, dict) or not others):
        return build(classes[0], value, path, problems)
    alike = [option for option in others if typing.get_origin(option) is type(value)]
    others = alike or others
    for option in others[:-1]:
        attempt: list[Problem] = []
        built = build(option, value, path, attempt)
        if not attempt:
            return built
    before = len(problems)
    built = build(others[-1], value, path, problems)
    literals = [option for option in others[:-1] if typing.get_origin(option) is typing.Literal]
    words = [str(word) for option in literals for word in typing.get_args(option)]
    if words and len(problems) > before:
        either = problems[-1].message.replace("expected ", f"expected {', '.join(words)} or ", 1)
        problems[-1] = dc.replace(problems[-1], message=either)
    return built


def _build_mixer(value: Any, path: Path, problems: list[Problem]) -> Mixer | None:
    """A named mixer. `kind` may be left out where the name is a built-in one; such a name may not mean another kind."""
    name = str(path[-1])
    if name == FULL:
        problems.append(Problem(path, f"'{FULL}' is the untouched layer and has no settings; choose another name"))
        return None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        problems.append(Problem(path, f"expected a mapping (key: value), got {describe(value)}"))
        return None
    kind = value.get("kind", name)
    if not isinstance(kind, str) or kind not in BUILT_IN:
        where = (*path, "kind")
        if "kind" in value:
            problems.append(Problem(where, f"unknown mixer kind {shortened(repr(kind))}" + suggest(kind, BUILT_IN)))
        else:
            problems.append(Problem(where, f"required, because '{name}' is not one of {', '.join(BUILT_IN)}"))
    elif name in BUILT_IN and kind != name:
        problems.append(Problem((*path, "kind"), f"'{name}' cannot be of kind '{kind}'; choose another name"))
    else:
        return _changed_mixer(BUILT_IN[kind], value, path, problems)
    return None


def _changed_mixer(built_in: Mixer, value: dict[str, Any], path: Path, problems: list[Problem]) -> Mixer | None:
    """A built-in mixer with the settings given, those for experts under `advanced`."""
    before, cls = len(problems), type(built_in)
    basic = {key: item for key, item in value.items() if key not in ("kind", "advanced")}
    names = {field.name for field in dc.fields(cls)} - {BY_LAYER}
    given = build_fields(cls, basic, path, problems, [name for name in BASIC if name in names])
    if (advanced := value.get("advanced")) is not None:
        given |= build_fields(cls, advanced, (*path, "advanced"), problems, sorted(names.difference(BASIC)))
    if len(problems) > before:
        return None
    try:
        return dc.replace(built_in, **given)
    except ValueError as error:  # from __post_init__
        problems.extend(Problem(path, message) for message in str(error).split("; "))
        return None


def _build_literal(options: tuple[Any, ...], value: Any, path: Path, problems: list[Problem]) -> Any:
    if not any(value == option and type(value) is type(option) for option in options):
        text = ", ".join(str(option) for option in options)
        near = get_close_matches(str(value), [str(option) for option in options], 1)
        hint = f"; did you mean '{near[0]}'?" if near and isinstance(value, str) else ""
        problems.append(
            Problem(path, f"expected {'one of ' if len(options) > 1 else ''}{text}, got {describe(value)}{hint}")
        )
        return None
    return value


def _build_list(item: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    if not isinstance(value, list):
        problems.append(Problem(path, f"expected a list, got {describe(value)}"))
        return None
    return [build(item, element, (*path, i), problems) for i, element in enumerate(value)]


def _build_dict(arguments: tuple[Any, Any], value: Any, path: Path, problems: list[Problem]) -> Any:
    key_type, item = arguments
    if not isinstance(value, dict):
        problems.append(Problem(path, f"expected a mapping (key: value), got {describe(value)}"))
        return None
    if key_type is str:
        for key in value:
            if not isinstance(key, str):
                problems.append(Problem((*path, key), f"expected a name as key, got {describe(key)}; put it in quotes"))
    return {key: build(item, element, (*path, key), problems) for key, element in value.items()}


def _build_scalar(annotation: Any, rule: Rule, value: Any, path: Path, problems: list[Problem]) -> Any:
    """str, bool, int (with `4K` and `100M`) and float, as their rule has it; the hints name YAML's own traps."""
    if annotation is int and isinstance(value, str) and (count := parse_count(value)) is not None:
        value = count
    if annotation is float and type(value) is int and REAL.problem(value) is None:
        value = float(value)
    if type(value) is not annotation:
        problems.append(Problem(path, _mismatch(annotation, value)))
    elif isinstance(rule, Range) and (problem := rule.problem(value)) is not None:
        problems.append(Problem(path, problem))
    elif isinstance(rule, PlainText):
        try:
            return rule.read(value)
        except ValueError as error:
            problems.append(Problem(path, str(error)))
    else:
        return value
    return None


def _mismatch(annotation: Any, value: Any) -> str:
    expected = {str: "text", bool: "true or false", int: "a whole number such as 4096, 4K or 100M", float: "a number"}
    hint = ""
    if annotation is float and isinstance(value, str) and (spelled := spelled_float(value)):
        hint = f" (YAML reads {value} as text; write {spelled})"
    elif annotation is int and isinstance(value, str) and spelled_float(value):
        hint = f" (YAML reads {value} as text; write the number out, or use K, M or B)"
    elif annotation is str and isinstance(value, int | float):
        hint = "; put it in quotes"
    return f"expected {expected[annotation]}, got {describe(value)}{hint}"
