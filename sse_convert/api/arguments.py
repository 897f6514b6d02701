"""What Python hands to the functions of the API: a value of another type is refused by name, before anything starts."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sse_convert.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """The function, with its arguments checked against their annotations, as far as these are plain.

    Raises (when called):
        UsageError: an argument is of another type.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            options = _options(signature.parameters[name].annotation)
            if options and not any(_fits(value, option) for option in options):
                raise _refusal(name, value, options)
        return function(*args, **kwargs)

    return typing.cast(F, call)


def _options(annotation: Any) -> list[Any]:
    """What a value may be; nothing where an annotation says more than is checked here."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = list(typing.get_args(annotation)) if union else [annotation]
    known = all(isinstance(option, type) or typing.get_origin(option) is Sequence for option in options)
    return options if known else []


def _fits(value: Any, option: Any) -> bool:
    if typing.get_origin(option) is Sequence:
        inner = _options(typing.get_args(option)[0])
        whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return whole and (not inner or all(any(_fits(item, kind) for kind in inner) for item in value))
    if option is Path:
        return isinstance(value, os.PathLike)
    if option is float:
        return type(value) in (int, float)
    return isinstance(value, option) and (option is bool or not isinstance(value, bool))


def _refusal(name: str, value: Any, options: list[Any]) -> UsageError:
    names = [getattr(option, "__name__", str(option)) for option in options if option is not types.NoneType]
    made = "make a recipe of it: sse_convert.recipe.recipe_from_dict(...)"
    return UsageError(
        f"{name} is {type(value).__name__} {value!r:.80}",
        expected=" or ".join(names),
        fix=made if isinstance(value, dict) and "Recipe" in names else f"correct {name}",
    )
