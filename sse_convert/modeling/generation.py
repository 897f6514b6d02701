"""What surrounds `generate` where more than the model is at hand. This file travels inside checkpoints."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any

_around: list[str] = []
"""the function that surrounds, by its name, once the package has said so"""


def surround_generation(name: str) -> None:
    """Let converted models generate inside of what a function makes of the model; it is imported when it is used.

    Args:
        name: `module:function`, of a context manager over a model.
    """
    _around[:] = [name]


def stepping(model: Any) -> AbstractContextManager[None]:
    """What surrounds the `generate` of a model; nothing, where a checkpoint's own code runs without the package."""
    if not _around:
        return nullcontext()
    around: Callable[[Any], AbstractContextManager[None]] = resolve_name(_around[0])
    return around(model)
