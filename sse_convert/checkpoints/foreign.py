"""What other people's files may hold: JSON of any shape, sizes of any size, anything that makes a library fail."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sse_convert.errors import CheckpointError, SSEConvertError
from sse_convert.process_memory import memory_for
from sse_convert.recipe.problems import shortened
from sse_convert.recipe.ranges import Range

MOST_WORDS = 300
"""characters of a library's own message"""
MOST_DEPTH = 50
"""of nested JSON that is handed on to other libraries"""
_WIDTH = Range(1, 2**24)
SIZES = {
    "num_hidden_layers": Range(1, 10_000),
    "hidden_size": _WIDTH,
    "intermediate_size": Range(1, 2**28),
    "num_attention_heads": _WIDTH,
    "num_key_value_heads": _WIDTH,
    "head_dim": _WIDTH,
    "vocab_size": Range(1, 2**28),
    "max_position_embeddings": Range(1, 2**40),
    "sliding_window": Range(0, 2**40),
}
"""whole numbers of a config.json by transformers' name for them; null means that a family computes it"""


@contextlib.contextmanager
def refusing(what: str, *, expected: str, fix: str) -> Iterator[None]:
    """Turn whatever a library raises while it works on a foreign file into one error.

    Libraries promise no set of exceptions for files that are wrong, so all are taken but those of the machine.

    Args:
        what: the sentence that the library's own words follow.
        expected: as in `CheckpointError`.
        fix: as in `CheckpointError`.

    Raises:
        CheckpointError: the block raised anything but an error of ours or want of memory.
    """
    try:
        with memory_for(f"finding out whether {what}"):
            yield
    except SSEConvertError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{what}: {shortened(lines[-1].strip(), MOST_WORDS)}", expected=expected, fix=fix
        ) from error


def parse_json(text: str | bytes) -> Any:
    """JSON as data.

    Raises:
        ValueError: it is not JSON, or is nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read, is no JSON object, or is nested too deeply.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        if _deeper(data, MOST_DEPTH):
            raise ValueError(f"nested more than {MOST_DEPTH} levels")
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {shortened(str(error))}", expected="a JSON object", fix="download the file again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", expected="a JSON object", fix="download the file again")
    return data


def _deeper(data: Any, levels: int) -> bool:
    """Whether data is nested deeper than this."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return levels < 0 or any(_deeper(value, levels - 1) for value in inner if isinstance(value, dict | list))


def check_sizes(raw: dict[str, Any], names: dict[str, str], where: str) -> None:
    """Make sure that the sizes in a config.json are numbers of a sensible size, before anything is built of them.

    Args:
        raw: config.json.
        names: transformers' name -> the family's own, where it has one (`attribute_map`).
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: naming the first one that is not.
    """
    for name, sizes in SIZES.items():
        for key in {name, names.get(name, name)}:
            value = raw.get(key)
            if value is None:
                continue
            problem = sizes.problem(value) if type(value) is int else f"expected a whole number, got {value!r}"
            if problem is not None:
                raise CheckpointError(
                    f"config.json of {where}: {key}: {shortened(problem)}",
                    expected=f"a whole number from {sizes.low} to {sizes.high}",
                    fix="correct config.json, or download it again",
                )
