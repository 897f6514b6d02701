"""Values that fields do not expect, and the ways to put them into valid data."""

import copy
import dataclasses as dc
import json
import math
from typing import Any

from hypothesis import strategies as st


@dc.dataclass(frozen=True)
class Raw:
    """Text that stands in a file as it is, where no data type of Python says it."""

    text: str

    def __repr__(self) -> str:
        shown = self.text if len(self.text) < 100 else f"{self.text[:20]}... of {len(self.text)} characters"
        return f"Raw({shown!r})"


NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10_000_000, 10**12, 10**30),
    *(-(2**63), -(10**30), 0.0, -0.0, 0.5, -0.5, 1.5, 1e-320, 1e-9, 1e9, 1e300, -1e300, 1.7e308),
    *(math.nan, math.inf, -math.inf),
)
TEXTS = (
    *("", " ", "~", "~/x", "~nobody-here/x", "$HOME/x", "${UNSET_HERE}/x", ".", "..", "/", "a/b/c", "../..", "a\nb"),
    *("\0", "a\0b", "\ud800", "\x1b[31mred", "\u202etxt", "é" * 130, "a" * 252, "a" * 300, "b" * 5000, "a/" * 3000),
    *("0", "-1", "1e3", "4K", "1.5M", "9" * 400 + "K", "9" * 400 + "GB", "nan", "null", "true", "no", "full", "sse"),
    *("sse*2", "sse*99999999999", "sse*" + "9" * 5000, "0-3", "-1--1", "9" * 5000, "bfloat16", "cuda:999"),
    *("[bold]x[/bold]", "{}", "%s %d", "{0}", "C:\\models\\x", "owner/name", "a--b/c..d", "x.git", "https://a.b/c"),
)
CONTAINERS: tuple[Any, ...] = ([], {}, [[]], [None], {"": None}, {"a": {"b": {}}}, [1, "a", None], {"1": 1, "x": [2]})


def depths(opening: str, closing: str) -> tuple[Raw, ...]:
    """Values nested deeper than any reader should follow."""
    return tuple(Raw(opening * depth + closing * depth) for depth in (60, 3000, 20_000))


JSON_ONLY = (*depths("[", "]"), *depths('{"a":', "}"), Raw("9" * 5000), Raw("1e999"), Raw('"\\ud800"'), Raw("NaN"))


def odd_values(raw: tuple[Raw, ...]) -> st.SearchStrategy[Any]:
    """A value of any kind, most of them wrong for a given field.

    Args:
        raw: those that the file's format alone can say.
    """
    kinds = [st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(CONTAINERS), st.sampled_from(raw)]
    small = (st.none(), st.booleans(), st.integers(-10, 1000), st.integers(), st.floats(), st.text(max_size=6))
    return st.one_of(*small, *kinds).map(copy.deepcopy)


def places(data: Any) -> list[tuple[Any, ...]]:
    """The paths of everything inside nested lists and mappings."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path for key, value in items for path in ((key,), *((key, *below) for below in places(value)))]


@st.composite
def changed(draw: st.DrawFn, base: Any, values: st.SearchStrategy[Any], most: int = 3) -> Any:
    """Valid data with up to `most` changes: values replaced, removed, added, wrapped or moved by a little."""
    data = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, most))):
        if not (found := places(data)):
            break
        path = draw(st.sampled_from(found))
        owner = data
        for key in path[:-1]:
            owner = owner[key]
        _change(draw, owner, path[-1], values)
    return data


def _change(draw: st.DrawFn, owner: Any, key: Any, values: st.SearchStrategy[Any]) -> None:
    here = owner[key]
    match draw(st.sampled_from(("replace", "replace", "replace", "near", "near", "remove", "add", "wrap", "swap"))):
        case "near" if type(here) in (int, float):
            owner[key] = draw(st.sampled_from((here + 1, here - 1, -here, here * 2, here / 2, str(here), float(here))))
        case "near" if isinstance(here, str):
            owner[key] = draw(st.sampled_from((here.upper(), here + "x", here[:-1], f" {here}", [here])))
        case "remove":
            del owner[key]
        case "add" if isinstance(owner, dict):
            owner[draw(st.sampled_from(("extra", "", "sse", "a.b", "é", "0", "__class__")))] = draw(values)
        case "add":
            owner.insert(0, draw(values))
        case "wrap":
            owner[key] = [here]
        case "swap":
            other = draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
            owner[key], owner[other] = owner[other], owner[key]
        case _:
            owner[key] = draw(values)


def json_text(data: Any) -> str:
    """Data as JSON, `Raw` text included, and numbers that JSON has no form for as Python writes them."""
    if isinstance(data, Raw):
        return data.text
    if isinstance(data, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {json_text(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(json_text, data)) + "]"
    return json.dumps(data)


def yaml_text(data: Any) -> str:
    """Data as YAML in flow style, `Raw` text included."""
    if isinstance(data, Raw):
        return data.text
    if isinstance(data, dict):
        return "{" + ", ".join(f"{yaml_text(key)}: {yaml_text(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(yaml_text, data)) + "]"
    if isinstance(data, float):
        return f"{data:.17e}" if math.isfinite(data) else f".{data}" if data > 0 or data != data else "-.inf"
    return json.dumps(data)
