"""YAML text to plain data, remembering the line of every value. Stricter than PyYAML where recipes need it.

Only `true` and `false` are booleans (in YAML 1.1 `mixed_precision: no` would be False), a key given twice is an error,
and only plain data is built.
"""

from typing import Any

import yaml

from sse_convert.errors import RecipeError
from sse_convert.recipe.problems import Path, dotted


class _Loader(yaml.SafeLoader):
    """SafeLoader whose booleans are `true` and `false` alone."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str, origin: str) -> tuple[Any, dict[Path, int]]:
    """YAML text as plain data, with the line (from 1) of each value by path.

    Raises:
        RecipeError: the text is not YAML, or a mapping has a key twice.
    """
    lines: dict[Path, int] = {}
    duplicates: list[str] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else _construct(loader, node, (), lines, duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(
            f"{origin}: {where}{error.problem or error.context}", expected="valid YAML", fix="correct that line"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: {error}", expected="valid YAML", fix="save the file as plain text") from error
    except RecursionError as error:
        raise RecipeError(f"{origin}: an alias contains itself", expected="a finite document") from error
    if duplicates:
        raise RecipeError(
            "\n  ".join([f"{origin}: the same key is given twice", *duplicates]),
            expected="each key once",
            fix="keep one of the lines",
        )
    return data, lines


def parse_value(text: str, origin: str) -> Any:
    """One YAML value, as given to `--set`."""
    return parse(text, origin)[0]


def _construct(loader: _Loader, node: yaml.Node, path: Path, lines: dict[Path, int], duplicates: list[str]) -> Any:
    """Build plain data from a YAML node, noting lines and duplicate keys on the way."""
    lines[path] = node.start_mark.line + 1
    if node.tag == "tag:yaml.org,2002:seq":
        return [_construct(loader, item, (*path, i), lines, duplicates) for i, item in enumerate(node.value)]
    if node.tag != "tag:yaml.org,2002:map" or not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    seen: set[str | int] = set()
    for key_node, _ in node.value:
        key = _key(loader, key_node)
        if key in seen:
            duplicates.append(f"line {key_node.start_mark.line + 1}: {dotted((*path, key))}")
        seen.add(key)
    loader.flatten_mapping(node)  # merge keys (`<<: *defaults`)
    result = {}
    for key_node, value_node in node.value:
        key = _key(loader, key_node)
        result[key] = _construct(loader, value_node, (*path, key), lines, duplicates)
        lines[(*path, key)] = key_node.start_mark.line + 1
    return result


def _key(loader: _Loader, node: yaml.Node) -> str | int:
    """A mapping key: a whole number or text (other kinds by their spelling)."""
    if node.tag == "tag:yaml.org,2002:merge":
        return "<<"
    key = loader.construct_object(node, deep=True)
    return key if isinstance(key, str | int) else str(key)
