"""The evaluation.json of a run as the object it was written from, read strictly: damaged files and those of another
version are refused by name."""

import dataclasses as dc
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from sse_convert.errors import CheckpointError
from sse_convert.evaluation.report import SCHEMA, EvalReport


def read_evaluation(path: Path) -> EvalReport:
    """A report of `eval`.

    Raises:
        CheckpointError: the file is damaged, of another version, or something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", expected="a JSON file", fix="make it again, or remove it"
        ) from error
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {data['schema']!r}",
            expected=f"schema {SCHEMA}",
            fix="make it again with this version of sse-convert, or upgrade sse-convert",
        )
    try:
        report: EvalReport = _built(EvalReport, data, "")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no report of `eval`: {error}",
            expected=f"a JSON object with {', '.join(field.name for field in dc.fields(EvalReport))}",
            fix="name another file, or make this one again",
        ) from error
    return report


def _built(annotation: Any, data: Any, place: str) -> Any:
    """Data as its annotation has it. Null is NaN where there must be a number.

    Raises:
        ValueError: what is missing or of another type, by its place.
    """
    kind, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if dc.is_dataclass(annotation):
        return _built_fields(annotation, data, place)
    if kind is types.UnionType:
        return None if data is None else _built(parts[0], data, place)
    if kind is tuple and isinstance(data, list):
        return tuple(_built(parts[0], item, f"{place}.{i}") for i, item in enumerate(data))
    if kind is float and data is None:
        return math.nan
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise ValueError(f"{place} is {type(data).__name__}, not {'list' if kind is tuple else kind.__name__}")
    return data


def _built_fields(cls: Any, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{place or 'it'} is not an object")
    hints, found = typing.get_type_hints(cls), {}
    for field in dc.fields(cls):
        hint, name = hints[field.name], f"{place}.{field.name}" if place else field.name
        if field.name in data:
            found[field.name] = _built(hint, data[field.name], name)
        elif dc.is_dataclass(hint):  # its fields are written among those around it
            found[field.name] = _built(hint, data, place)
        elif field.default is dc.MISSING:
            raise ValueError(f"{name} is missing")
    return cls(**found)
