"""YAML text to plain data, remembering the line of every value. Stricter than PyYAML where recipes need it.

Only `true` and `false` are booleans (in YAML 1.1 `mixed_precision: no` would be False). A date is text, and so are
`1:30` and `017`, which YAML 1.1 reads to other bases. A key given twice is an error. Only plain data is built: text,
numbers, booleans, null, lists and mappings. Size, depth and number of values are limited, aliases counted as often as
they repeat.
"""

import re
from typing import Any

import yaml

from sse_convert.errors import RecipeError
from sse_convert.recipe.problems import Path, dotted, shortened
from sse_convert.recipe.ranges import WHOLE

MOST_CHARACTERS = 1 << 18
MOST_VALUES = 10_000
MOST_DEPTH = 50
MOST_DIGITS = 1000
"""of a number"""
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null")}
_PLAIN = {*_SCALARS, f"{_TAG}seq", f"{_TAG}map", f"{_TAG}merge"}
_INT = r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+"
_FLOAT = r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"


class _Loader(yaml.SafeLoader):
    """SafeLoader of plain data, which stops at documents that are larger or deeper than any recipe."""

    values = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node; one that an alias repeats is counted when data is built from it."""
        self.depth += 1
        self.count(None if parent is None else parent.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def count(self, mark: Any) -> None:
        """Count one value."""
        self.values += 1
        if self.values > MOST_VALUES or self.depth > MOST_DEPTH:
            most = f"{MOST_VALUES} values" if self.values > MOST_VALUES else f"{MOST_DEPTH} levels"
            raise yaml.MarkedYAMLError(
                problem=f"more than {most}, those that aliases repeat included", problem_mark=mark
            )

    def flatten_mapping(self, node: Any) -> None:
        """Merge keys (`<<: *defaults`)."""
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES} merged keys", problem_mark=node.start_mark)

    def plain(self, node: yaml.Node) -> Any:
        """The value of a scalar.

        Raises:
            yaml.MarkedYAMLError: it has another type than plain data, or is not written as its type.
        """
        text = shortened(str(node.value))
        if node.tag not in _SCALARS or not isinstance(node, yaml.ScalarNode):
            kind = node.tag.removeprefix(_TAG)
            problem = (
                f"{shortened(kind)} is not plain data; expected text, a number, true, false, null, a list or a mapping"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        try:
            if node.tag != f"{_TAG}str" and (node.tag != self._written(node) or len(node.value) > MOST_DIGITS):
                raise ValueError
            return self.construct_object(node)
        except ValueError as error:
            problem = f"{text} cannot be read as {node.tag.removeprefix(_TAG)}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def _written(self, node: yaml.ScalarNode) -> Any:
        """The type that the text of a scalar has without a tag."""
        found = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        return f"{_TAG}str" if node.style else found


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """What plain scalars are, by their first letter: null, the booleans `true` and `false`, numbers, merge keys."""
    kept = {
        first: [(tag, pattern) for tag, pattern in found if tag in (f"{_TAG}null", f"{_TAG}merge")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    own = {"bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"), "int": (_INT, "-+0123456789")}
    own["float"] = (_FLOAT, "-+.0123456789")
    for kind, (pattern, letters) in own.items():
        for letter in letters:
            kept.setdefault(letter, []).append((f"{_TAG}{kind}", re.compile(f"(?:{pattern})$")))
    return kept


_Loader.yaml_implicit_resolvers = _resolvers()


def parse(text: str, origin: str) -> tuple[Any, dict[Path, int]]:
    """YAML text as plain data, with the line (from 1) of each value by path.

    Raises:
        RecipeError: the text is not YAML, or not plain data, is larger or deeper than recipes are, or has a key twice.
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(
            f"{origin} has {len(text)} characters", expected=f"a recipe of at most {MOST_CHARACTERS}", fix="shorten it"
        )
    lines: dict[Path, int] = {}
    duplicates: list[str] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        loader.values = 0
        data = None if node is None else _construct(loader, node, (), lines, duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(
            f"{origin}: {where}{error.problem or error.context}", expected="valid YAML", fix="correct that line"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: {error}", expected="valid YAML", fix="save the file as plain text") from error
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
    loader.depth = len(path)
    loader.count(node.start_mark)
    lines[path] = node.start_mark.line + 1
    if node.tag == f"{_TAG}seq" and isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, i), lines, duplicates) for i, item in enumerate(node.value)]
    if node.tag != f"{_TAG}map" or not isinstance(node, yaml.MappingNode):
        return loader.plain(node)
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
    if node.tag == f"{_TAG}merge":
        return "<<"
    key = loader.plain(node)
    return key if isinstance(key, str) or (type(key) is int and WHOLE.problem(key) is None) else str(node.value)
