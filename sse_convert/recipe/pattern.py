"""Which mixer each layer gets. Pattern or ratio repeats to fill; then `keep`, then `overrides` win."""

import re
from collections.abc import Iterable

from sse_convert.errors import RecipeError
from sse_convert.mixers import BUILT_IN, FULL, Mixer
from sse_convert.recipe.problems import shortened, suggest
from sse_convert.recipe.schema import Layers, Recipe

UNTOUCHED = Layers(pattern=[FULL])
"""every layer as it is: what the control `teacher_tuned` trains. A recipe file may not ask for it"""
_INDEX = re.compile(r"-?\d{1,9}", re.ASCII)
_RANGE = re.compile(r"(-?\d{1,9})-(-?\d{1,9})", re.ASCII)
_REPEAT = re.compile(r"(.+?)\s*\*\s*(\d{1,4})", re.ASCII)
MOST_LAYERS = 10_000
"""that a pattern may name; no model has as many"""


def resolve(recipe: Recipe, num_layers: int) -> tuple[list[str], dict[str, Mixer]]:
    """The mixer name of each layer, and the mixers in use by name (`full` is a name without settings).

    Raises:
        RecipeError: an index is out of range, a mixer is undefined, or nothing would be converted.
    """
    if recipe.layers == UNTOUCHED:
        return [FULL] * num_layers, {}
    known = {**BUILT_IN, **recipe.mixers}
    names = expand_pattern(recipe.layers, known, num_layers)
    return names, {name: known[name] for name in dict.fromkeys(names) if name != FULL}


def expand_pattern(layers: Layers, mixers: Iterable[str], num_layers: int) -> list[str]:
    """The mixer name of each of `num_layers` layers; `mixers` are the names that exist beside `full`.

    Raises:
        RecipeError: see `resolve`.
    """
    unit = pattern_unit(layers)
    problems = mixer_name_problems(layers, mixers)
    names = [unit[i % len(unit)] for i in range(num_layers)]
    for key in layers.keep:
        for index in _indices(key, num_layers, "layers.keep", problems):
            names[index] = FULL
    for key, name in layers.overrides.items():
        for index in _indices(key, num_layers, "layers.overrides", problems):
            names[index] = name
    if problems:
        raise RecipeError(
            "\n".join(problems),
            expected=f"layer indices from {-num_layers} to {num_layers - 1} and defined mixers",
            fix="correct layers: in the recipe; `sse-convert plan` prints the resulting table",
        )
    if num_layers and all(name == FULL for name in names):
        raise nothing_converted(f"all {num_layers} layers stay '{FULL}'")
    return names


def nothing_converted(why: str) -> RecipeError:
    """The error for a recipe that leaves every layer as it is."""
    return RecipeError(
        f"layers: {why}, so nothing is converted",
        expected="at least one layer with a mixer",
        fix="use for example layers: {pattern: [sse, full]}",
    )


def pattern_unit(layers: Layers) -> list[str]:
    """The unit that repeats to fill the model: `[sse*2, full]` -> sse, sse, full; `full` when none is given."""
    return [name for name, count in pattern_runs(layers) for _ in range(count)] or [FULL]


def pattern_runs(layers: Layers) -> list[tuple[str, int]]:
    """The same unit as names and how often each is repeated: `[sse*2, full]` -> (sse, 2), (full, 1)."""
    if layers.ratio:
        return list(layers.ratio.items())
    repeats = [(entry, _REPEAT.fullmatch(entry)) for entry in layers.pattern or []]
    return [(found[1], int(found[2])) if found else (entry, 1) for entry, found in repeats]


def mixer_name_problems(layers: Layers, mixers: Iterable[str]) -> list[str]:
    """A message for each mixer that `layers` uses and nothing defines."""
    used = [("layers.ratio" if layers.ratio else "layers.pattern", name) for name, _ in pattern_runs(layers)]
    used += [("layers.overrides", name) for name in layers.overrides.values()]
    known = (*mixers, FULL)
    problems = []
    for where, name in dict.fromkeys(used):
        if name in known:
            continue
        problems.append(f"{where}: mixer '{shortened(name)}' is not defined" + suggest(name, known))
    return problems


def layer_range(key: int | str) -> tuple[int, int] | None:
    """First and last layer (inclusive, possibly negative) of `7`, `-1`, `"3-5"` or `"-4--1"`; None if malformed."""
    if isinstance(key, int):
        return key, key
    if _INDEX.fullmatch(key.strip()):
        return int(key), int(key)
    match = _RANGE.fullmatch(key.strip())
    return (int(match[1]), int(match[2])) if match else None


def _indices(key: int | str, num_layers: int, where: str, problems: list[str]) -> range:
    """The layers that `key` names; what cannot be is added to `problems`."""
    bounds = layer_range(key)
    if bounds is None:
        problems.append(f"{where}: {key!r} is neither an index nor a range such as 3-5 or -4--1")
        return range(0)
    for index in bounds:
        if not -num_layers <= index < num_layers:
            problems.append(f"{where}: {key} is out of range, the model has {num_layers} layers")
            return range(0)
    first, last = (index % num_layers for index in bounds)
    if first > last:
        problems.append(f"{where}: range {key} is empty, layer {first} comes after layer {last}")
    return range(first, last + 1)
