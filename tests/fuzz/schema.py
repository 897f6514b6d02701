"""Recipes made of the schema: every key of every mapping, with values of its type, and some that are not."""

import dataclasses as dc
import types
import typing
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from sse_convert.mixers import BASIC, BUILT_IN, BY_LAYER, Mixer
from sse_convert.recipe.schema import Recipe
from tests.fuzz.documents import DEEP, TAGGED
from tests.fuzz.places import recipe
from tests.fuzz.values import Raw, changed, odd_values

WRONG = odd_values((*DEEP, *map(Raw, TAGGED)))


def recipes() -> st.SearchStrategy[dict[str, Any]]:
    """A recipe with a value or two of the right types, with keys of the schema put into it, or with wrong values."""
    return st.one_of(_with_values(), _with_values(), _with_keys(), changed(recipe(), WRONG))


@st.composite
def _with_values(draw: st.DrawFn) -> dict[str, Any]:
    data = recipe()
    for _ in range(draw(st.integers(1, 2))):
        owner, name, annotation = draw(st.sampled_from(list(_fields(Recipe, data))))
        owner[name] = draw(_right(annotation))
    return data


def _fields(cls: type[Any], data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Mapping, key and annotation of every setting in a recipe's mappings, those that it does not give included."""
    for name, annotation in typing.get_type_hints(cls).items():
        options = [annotation, *typing.get_args(annotation)]
        inner = next((kind for kind in options if isinstance(kind, type) and dc.is_dataclass(kind)), None)
        below = data.get(name)
        for item in below if isinstance(below, list) else [below]:
            if inner is not None and isinstance(item, dict):
                yield from _fields(inner, item)
        if inner is None:
            yield data, name, annotation


@st.composite
def _with_keys(draw: st.DrawFn) -> dict[str, Any]:
    data = recipe()
    for name, value in draw(_some_keys(Recipe, left_out=("recipe_version", "model"))).items():
        both = isinstance(value, dict) and isinstance(data.get(name), dict) and name != "layers"
        data[name] = {**data[name], **value} if both else value
    return data


def _some_keys(cls: type[Any], left_out: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """Some keys of a mapping, all those that are required among them."""
    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for field in dc.fields(cls):
        if field.name not in left_out:
            required = field.default is dc.MISSING and field.default_factory is dc.MISSING
            (made if required else optional)[field.name] = values_of(hints[field.name])
    chosen = st.lists(st.sampled_from(sorted(optional) or [""]), max_size=2, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries(made | {name: optional[name] for name in names if name}))


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; one in ten is something else."""
    return st.integers(0, 9).flatmap(lambda n: WRONG if n == 0 else _right(annotation))


def _right(annotation: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation == Mixer:
        return _mixers()
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(_right(option) for option in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(st.deferred(lambda: values_of(arguments[0])), max_size=2)
    if origin is dict:
        keys = st.sampled_from(("sse", "sliding", "full", "mine", "0", 0, -1, "0-1"))
        return st.dictionaries(keys, st.deferred(lambda: values_of(arguments[1])), max_size=2)
    if dc.is_dataclass(annotation) and isinstance(annotation, type):
        return st.deferred(lambda: _some_keys(annotation))
    return {
        int: st.sampled_from((1, 2, 4, 16, 32, 64, 128, "1K", "2M")) | st.integers(-1, 1 << 20),
        float: st.sampled_from((0.0, 0.001, 0.05, 0.5, 1.0, 2.0)) | st.floats(allow_nan=False),
        str: st.sampled_from(
            ("sse", "sliding", "full", "qwen3", "train.txt", "out", "auto", "yarn", "1GB", "[a]", "a")
        ),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


def _mixers() -> st.SearchStrategy[dict[str, Any]]:
    """Settings of a mixer, those for experts under `advanced`."""

    def split(settings: dict[str, Any]) -> dict[str, Any]:
        advanced = {name: value for name, value in settings.items() if name not in BASIC}
        return {**{name: value for name, value in settings.items() if name in BASIC}, "advanced": advanced}

    return st.sampled_from(sorted(BUILT_IN)).flatmap(
        lambda kind: _some_keys(type(BUILT_IN[kind]), left_out=("kind", BY_LAYER)).map(
            lambda given: {"kind": kind, **split(given)}
        )
    )
