"""`eval` under a launcher: processes read the windows of split stages together; all else the first one does alone."""

import os
from collections.abc import Callable
from typing import TypeVar

from sse_convert.evaluation.long_rows import splits_rows
from sse_convert.recipe.schema import Recipe

T = TypeVar("T")


def meet_others(recipe: Recipe) -> bool:
    """Meet the other processes that were launched, if there are any.

    Returns:
        Whether this is the process that writes and says what was found.

    Raises:
        HardwareError: a parallel mode that is not offered.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from sse_convert.training.setup import make_accelerator

    return bool(make_accelerator(recipe.train).is_main_process)


def found_by_all(recipe: Recipe, main: bool, measure: Callable[[], T]) -> T:
    """What every process measures where rows are split, and else the first one for all.

    Args:
        recipe: whether it splits rows.
        main: whether this is the first process.
        measure: makes it; plain data that can be sent.
    """
    if splits_rows(recipe) or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return measure()
    from accelerate.utils import broadcast_object_list

    found = [measure() if main else None]
    broadcast_object_list(found)
    (result,) = found
    assert result is not None, "the first process sends what it found"
    return result
