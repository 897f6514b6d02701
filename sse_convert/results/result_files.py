"""JSON files of a run, read strictly: damaged ones and those of another version are refused by name."""

import json
from pathlib import Path
from typing import Any

from sse_convert.errors import CheckpointError

Shape = dict[str, Any]
"""key -> the type its value must have, or the shape of a mapping"""

_SCORES: Shape = {"name": str, "parameters": int, "held_out": list, "needles": list, "speed": list}
EVALUATION: Shape = {
    "conditions": dict,
    "teacher": _SCORES,
    "student": _SCORES,
    **dict.fromkeys(("loss_gaps", "retention", "cache"), list),
}
STAGE: Shape = {"inputs": dict, "hash": str, "report": dict}


def read_json(path: Path, shape: Shape, *, schema: int | None = None) -> dict[str, Any]:
    """A JSON object.

    Args:
        path: the file.
        shape: keys it must have.
        schema: version it must have, where the file names one.

    Raises:
        CheckpointError: it cannot be read, is of another version, or lacks a key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", expected="a JSON file", fix="make it again, or remove it"
        ) from error
    if schema is not None and isinstance(data, dict) and data.get("schema") != schema:
        raise CheckpointError(
            f"{path} has schema {data.get('schema')!r}",
            expected=f"schema {schema}",
            fix="make it again with this version of sse-convert, or upgrade sse-convert",
        )
    if problem := _problem(data, shape, ""):
        raise CheckpointError(
            f"{path} is not what its name says: {problem}",
            expected=f"a JSON object with {', '.join(shape)}",
            fix="make it again, or remove it",
        )
    result: dict[str, Any] = data
    return result


def _problem(data: Any, shape: Shape, place: str) -> str | None:
    if not isinstance(data, dict):
        return f"{place or 'it'} is not an object"
    for key, expected in shape.items():
        name = f"{place}.{key}" if place else key
        if key not in data:
            return f"{name} is missing"
        if isinstance(expected, dict):
            if problem := _problem(data[key], expected, name):
                return problem
        elif not isinstance(data[key], expected):
            return f"{name} is {type(data[key]).__name__}, not {expected.__name__}"
    return None
