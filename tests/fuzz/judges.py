"""What makes an accepted input right, by command."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sse_convert.recipe import load_recipe, recipe_from_dict, recipe_hash

MAY_BE_NOTHING = {"revision", "break_even", "read_top_k", "row_top_k"}
"""keys of a plan that have no value in some recipes; any other null stands for a number that is not finite"""
LARGEST = 1e40


def plan_numbers(result: dict[str, Any]) -> str | None:
    """Every number of a plan is finite."""
    return _wrong(result, "")


def same_recipe(path: Path, overrides: list[str], result: dict[str, Any]) -> str | None:
    """A plan's numbers are finite, and its recipe means the same after `to_dict` and JSON."""
    read = load_recipe(path, overrides)
    again = recipe_from_dict(json.loads(json.dumps(read.to_dict(), allow_nan=False)))
    return plan_numbers(result) if recipe_hash(again) == recipe_hash(read) else "reads differently after to_dict"


def readable_shards(shards: Iterable[Path], result: dict[str, Any]) -> str | None:
    """A plan's numbers are finite, and the safetensors library reads the shards as well."""
    for shard in shards:
        try:
            with safe_open(shard, "pt") as file:
                list(file.keys())
        except (SafetensorError, OSError) as error:
            return f"the safetensors library refuses {shard.name}: {error}"
    return plan_numbers(result)


def _wrong(value: Any, key: str) -> str | None:
    if isinstance(value, dict):
        return next((wrong for name, item in value.items() if (wrong := _wrong(item, name))), None)
    if isinstance(value, list):
        return next((wrong for item in value if (wrong := _wrong(item, key))), None)
    if value is None and key not in MAY_BE_NOTHING:
        return f"{key} is not finite"
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < LARGEST):
        return f"{key} is {value}"
    return None


def one_token(result: dict[str, Any]) -> str | None:
    """A prompt was continued by one token."""
    return None if result["new_tokens"] == 1 else f"{result['new_tokens']} tokens were generated"


def no_number_missing(result: dict[str, Any]) -> str | None:
    """What a command reports is JSON without NaN (checked while it is read); it has content."""
    return None if result else "an empty result"


def text_was_text(path: Path, result: dict[str, Any]) -> str | None:
    """What was read as text is no file of another format, and decodes."""
    if path.suffix in (".json", ".csv", ".tsv"):
        return f"{path.suffix} was read as plain text"
    if path.suffix != ".parquet":
        path.read_bytes().decode()
    return None if result else "an empty result"
