"""`--set a.b=c`: change one value of a recipe from the command line, before it is checked."""

import copy
from difflib import get_close_matches
from typing import Any

from sse_convert.errors import UsageError
from sse_convert.recipe.problems import Path, dotted, shortened
from sse_convert.recipe.source import parse_value


def apply_overrides(data: Any, overrides: list[str]) -> tuple[Any, dict[Path, str]]:
    """`data` with each `path=value` applied in order, and where each override landed (path to its spelling).

    List items are named by index (`stages.0.tokens=64K`, negative from the end) or, where they have a `name`, by it
    (`stages.align.tokens=64K`). Values are YAML. Keys that the schema does not know are left for the loader to report.

    Raises:
        UsageError: not of the form path=value, a list has no such item, or the path goes through a plain value.
    """
    data = copy.deepcopy(data)
    sets: dict[Path, str] = {}
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator or not all(path.split(".")):
            raise UsageError(
                f"--set {shortened(override)}: not of the form path=value",
                expected="a dotted path, an equals sign and a YAML value",
                fix="for example --set stages.0.tokens=1M",
            )
        spelling = f"--set {shortened(override)}"
        sets[_assign(data, path.split("."), parse_value(value, spelling), spelling)] = spelling
    return data, sets


def _assign(data: Any, keys: list[str], value: Any, spelling: str) -> Path:
    """Put `value` at `keys`, making mappings on the way; returns the path with list indices resolved."""
    here, path = data, ()  # type: tuple[Any, Path]
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list):
            index = _index(here, key, path, spelling)
            path = (*path, index)
            if last:
                here[index] = value
            here = here[index]
        elif isinstance(here, dict):
            name = next((known for known in here if str(known) == key), key)
            path = (*path, name)
            if last:
                here[name] = value
            elif here.get(name) is None:
                here[name] = {}
            here = here[name]
        else:
            raise UsageError(
                f"{spelling}: {dotted(path)} is {shortened(repr(here))} and has no keys",
                expected="a path that ends at a value",
                fix=f"--set {dotted(path)}=VALUE",
            )
    return path


def _index(items: list[Any], key: str, path: Path, spelling: str) -> int:
    """The list position that `key` means: an index, or the `name` of an item."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if key in names:
        return names.index(key)
    try:
        index = int(key)
    except ValueError:
        index = len(items)
    if not -len(items) <= index < len(items):
        named = [str(name) for name in names if name is not None]
        near = get_close_matches(key, named, 1)
        bound = f"0 to {len(items) - 1}" if items else "nothing: the list is empty"
        raise UsageError(
            f"{spelling}: {dotted(path)} has no item {shortened(key)!r}",
            expected=bound + (f", or a name: {', '.join(named)}" if named else ""),
            fix=f"did you mean {near[0]}?" if near else f"set the whole list: --set '{dotted(path)}=[...]'",
        )
    return index % len(items)
