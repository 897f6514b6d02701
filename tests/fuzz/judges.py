"""What makes an accepted input right, by command."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from sse_convert.recipe import load_recipe, recipe_from_dict, recipe_hash

MAY_BE_NOTHING = {"revision", "teacher", "choice", "converted", "break_even"}
"""keys of a plan that have no value in some recipes; any other null stands for a number that is not finite"""
LARGEST = 1e40
WORDS, UNKNOWN = {f"w{i}" for i in range(97)}, "w0"
"""of the teacher's tokenizer"""
WORD = re.compile(r"\w+|[^\w\s]+")
"""of its pre-tokenizer, Whitespace"""
ODD = re.compile(r"[^\x20-\x7e\t\n\r]")
"""letters that Python and the tokenizer's language may count to words or not"""


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


def names(file: str, place: tuple[Any, ...]) -> Callable[[dict[str, Any]], str | None]:
    """Of an error: it names the file or one of the keys that lead to what is wrong."""

    def judge(error: dict[str, Any]) -> str | None:
        said = f"{error['what']} {error['expected']} {error['fix']}"
        return None if any(str(word) in said for word in (file, *place)) else f"neither file nor key: {error}"

    return judge


def one_token(result: dict[str, Any]) -> str | None:
    """A prompt was continued by one token."""
    return None if result["new_tokens"] == 1 else f"{result['new_tokens']} tokens were generated"


def no_number_missing(result: dict[str, Any]) -> str | None:
    """What a command reports is JSON without NaN (checked while it is read); it has content."""
    return None if result else "an empty result"


def same_text(path: Path, settings: dict[str, Any], result: dict[str, Any]) -> str | None:
    """The tokens are those of the documents, read here in the plainest way."""
    if path.suffix in (".json", ".csv", ".tsv", ".gz", ".arrow"):
        return f"{path.suffix} was read as plain text"
    text = " ".join(_documents(path, settings))
    expected = [word if word in WORDS else UNKNOWN for word in WORD.findall(text)]
    found = result["words"]
    if settings.get("kind") == "chat" or ODD.search(text):
        return None if all(word in text for word in found if word != UNKNOWN) else "words that the text does not have"
    return None if found == expected[: len(found)] and len(expected) - len(found) < 8 else "other words than the text's"


def _documents(path: Path, settings: dict[str, Any]) -> list[str]:
    field = "messages" if settings.get("kind") == "chat" else settings.get("field", "text")
    if path.suffix == ".parquet":
        values = pq.read_table(path).to_pydict()[field]
    elif path.suffix == ".jsonl":
        values = [json.loads(line)[field] for line in path.read_bytes().splitlines() if line.strip()]
    else:
        values = [path.read_bytes().decode("utf-8-sig")]
    return ["".join(str(message["content"]) for message in v) if isinstance(v, list) else v for v in values]
