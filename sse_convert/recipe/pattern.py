"""Which mixer each layer gets. The pattern repeats to fill; then `keep`, then `overrides` win; then `select`."""

import dataclasses as dc
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from sse_convert.errors import RecipeError
from sse_convert.mixers import FULL, Mixer, WindowMixer
from sse_convert.recipe.problems import shortened, suggest
from sse_convert.recipe.schema import FullHeads, Layers, Recipe, Select
from sse_convert.report import counted

_INDEX = re.compile(r"-?\d{1,9}", re.ASCII)
_RANGE = re.compile(r"(-?\d{1,9})-(-?\d{1,9})", re.ASCII)
_REPEAT = re.compile(r"(.+?)\s*\*\s*(\d{1,4})", re.ASCII)
_AT = "@"
MOST_LAYERS = 10_000
"""that a pattern may name; no model has as many"""
UNLESS_SAID = "sse+sliding"
"""what layers become that `select` does not keep, where no pattern says"""


@dc.dataclass(frozen=True, slots=True)
class OpenChoice:
    """A choice of layers to be made."""

    among: tuple[int, ...]
    """layers that would get a mixer, ascending"""
    keep: int
    """how many of `units` stay softmax"""
    units: tuple[int, ...]
    """what is chosen from: those layers, or their key-value heads, `layer * span + head`"""
    span: int = 1
    """heads of a layer that numbers leave room for; 1 where whole layers are chosen"""

    def by_layer(self, kept: Iterable[int]) -> dict[int | str, list[int] | Literal["full"]]:
        """Heads of each layer, of the numbers of some; a layer of which all are kept is a softmax layer."""
        found: dict[int, list[int]] = {}
        for layer, head in (divmod(unit, self.span) for unit in sorted(kept)):
            found.setdefault(layer, []).append(head)
        of = Counter(unit // self.span for unit in self.units)
        return {layer: FULL if len(heads) == of[layer] else heads for layer, heads in found.items()}


def resolve(recipe: Recipe, num_layers: int) -> tuple[list[str], dict[str, Mixer]]:
    """The mixer name of each layer, and the mixers in use by name (`full` is a name without settings).

    Raises:
        RecipeError: an index is out of range, a mixer is undefined, nothing would be converted, or `select` has not
            chosen yet.
    """
    known = recipe.known_mixers
    names = expand_pattern(recipe.layers, known, num_layers)
    if (select := recipe.layers.select) is not None:
        for index, heads in _chosen(select, names).items():
            names[index] = heads if isinstance(heads, str) else with_heads(names[index], heads)
    return names, {name: _mixer(name, known) for name in dict.fromkeys(names) if name != FULL}


def with_heads(name: str, heads: Iterable[int]) -> str:
    """The name of a mixer in layers of which some key-value heads see the whole row: `sse+sliding@0,2`."""
    return f"{name}{_AT}{','.join(map(str, sorted(set(heads))))}"


def _mixer(name: str, known: Mapping[str, Mixer]) -> Mixer:
    """The mixer of a name, which may say heads.

    Raises:
        RecipeError: it has no window.
    """
    base, heads = named_heads(name)
    mixer = known[base]
    if not heads:
        return mixer
    if not isinstance(mixer, WindowMixer):
        raise RecipeError(
            f"layers: heads {heads} are to see the whole row beside mixer '{base}', which has no window",
            expected=f"a mixer of kind sse+sliding or sliding where full_heads are given, not {mixer.kind}",
            fix="use sse+sliding, or leave the whole layer softmax",
        )
    return dc.replace(mixer, full_heads=tuple(heads))


def named_heads(name: str) -> tuple[str, list[int]]:
    """The mixer that a layer's name means, and key-value heads that see the whole row: what `with_heads` joined."""
    base, _, heads = name.partition(_AT)
    return base, [int(head) for head in heads.split(",") if head]


def expand_pattern(layers: Layers, mixers: Iterable[str], num_layers: int) -> list[str]:
    """The mixer name of each of `num_layers` layers before any is chosen; `mixers` are the names beside `full`.

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
            if isinstance(name, FullHeads) and names[index] == FULL:
                problems.append(f"layers.overrides: full_heads of layer {index}, all of whose heads are softmax")
            elif isinstance(name, FullHeads):
                names[index] = with_heads(names[index], name.full_heads)
            else:
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


def choice_of(select: Select, names: list[str], heads: Sequence[int] = ()) -> OpenChoice:
    """What `select` chooses among.

    Args:
        select: how many stay softmax.
        names: mixer of each layer before any is chosen.
        heads: of each layer, key-value heads that can be kept; read where heads are chosen.

    Raises:
        RecipeError: nothing would be converted, or no head can be kept.
    """
    among = tuple(i for i, name in enumerate(names) if name != FULL)
    span = max(heads, default=0) if select.by == "heads" else 1
    units = among
    if select.by == "heads":
        units = tuple(i * span + head for i in among for head in range(heads[i] if heads else 0))
    if select.by == "heads" and not units:
        raise RecipeError(
            "layers.select.by is heads, and no head of this model can be kept beside others that get a mixer",
            expected="layers of several key-value heads, without windows, learned sinks or norms over all heads",
            fix="set layers.select.by: layers",
        )
    share = select.keep.removesuffix("%") if isinstance(select.keep, str) else None
    keep = select.keep if isinstance(select.keep, int) else max(1, int(float(share or 0) * len(units) / 100 + 0.5))
    if keep >= len(units):
        raise RecipeError(
            f"layers.select.keep is {select.keep}, and {len(units)} {select.by} would get a mixer, so nothing is "
            "converted",
            expected=f"1 to {len(units) - 1} {select.by}, or a share such as 25%",
            fix="lower layers.select.keep",
        )
    return OpenChoice(among, keep, units, span)


def _chosen(select: Select, names: list[str]) -> dict[int, list[int] | Literal["full"]]:
    """The layers that `select` notes as chosen, and the heads of each."""
    if select.by == "layers" and not isinstance(select.chosen, dict):
        return dict.fromkeys(_chosen_layers(select, choice_of(select, names)), FULL)
    among = [i for i, name in enumerate(names) if name != FULL]
    if not isinstance(select.chosen, dict) or select.by != "heads":
        given = "not chosen yet" if select.chosen is None else f"{select.chosen}, and by is {select.by}"
        raise RecipeError(
            f"layers.select: which heads stay softmax is {given}",
            expected="layers.select.chosen: heads by layer, e.g. {7: [2]}, where by is heads, else a list of layers",
            fix="`sse-convert run` and `convert` choose first; `sse-convert select` names heads to write there",
        )
    strange = [key for key in select.chosen if str(key) not in map(str, among)]
    count = sum(len(heads) for heads in select.chosen.values() if heads != FULL)
    exact = isinstance(select.keep, int) and FULL not in select.chosen.values()
    if strange or (exact and select.keep != count):
        named = counted(count, "head")
        told = f"layer {strange[0]} gets no mixer" if strange else f"names {named}, and keep is {select.keep}"
        raise RecipeError(
            f"layers.select.chosen: {told}",
            expected=f"as many heads as keep says, of layers {', '.join(map(str, among))}",
            fix="remove layers.select.chosen, which `run` then chooses",
        )
    return {int(layer): heads for layer, heads in select.chosen.items()}


def _chosen_layers(select: Select, choice: OpenChoice) -> list[int]:
    """The layers that `select` notes as chosen."""
    if not isinstance(select.chosen, list):
        raise RecipeError(
            f"layers.select: which {choice.keep} of {len(choice.among)} layers stay softmax is not chosen yet",
            expected="layers.select.chosen",
            fix="`sse-convert run` and `convert` choose first; `sse-convert select` names layers to write there",
        )
    problems = []
    if (named := len(select.chosen)) != choice.keep:
        problems.append(f"names {counted(named, 'layer')}, and keep: {select.keep} asks for {choice.keep}")
    among = ", ".join(map(str, choice.among))
    strange = [index for index in select.chosen if index not in choice.among]
    problems += [f"layer {index} is none of those to choose from: {among}" for index in strange]
    if problems:
        raise RecipeError(
            "\n".join(f"layers.select.chosen: {problem}" for problem in problems),
            expected=f"{choice.keep} of layers {among}",
            fix="remove layers.select.chosen, which `run` then chooses",
        )
    return select.chosen


def nothing_converted(why: str) -> RecipeError:
    """The error for a recipe that leaves every layer as it is."""
    return RecipeError(
        f"layers: {why}, so nothing is converted",
        expected="at least one layer with a mixer",
        fix="use for example layers: {pattern: [sse, full]}",
    )


def pattern_unit(layers: Layers) -> list[str]:
    """The unit that repeats to fill the model: `[sse*2, full]` -> sse, sse, full. Where none is given, it is `full`, or
    what layers become that `select` does not keep."""
    unit = [name for name, count in pattern_runs(layers) for _ in range(count)]
    return unit or [FULL if layers.select is None else UNLESS_SAID]


def pattern_runs(layers: Layers) -> list[tuple[str, int]]:
    """The same unit as names and how often each is repeated: `[sse*2, full]` -> (sse, 2), (full, 1)."""
    repeats = [(entry, _REPEAT.fullmatch(entry)) for entry in layers.pattern or []]
    return [(found[1], int(found[2])) if found else (entry, 1) for entry, found in repeats]


def mixer_name_problems(layers: Layers, mixers: Iterable[str]) -> list[str]:
    """A message for each mixer that `layers` uses and nothing defines."""
    used = [("layers.pattern", name) for name, _ in pattern_runs(layers)]
    used += [("layers.overrides", name) for name in layers.overrides.values() if isinstance(name, str)]
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
