"""Results: what a person reads (lines on stderr) and what a program reads (JSON on stdout), from one object."""

import contextlib
import dataclasses as dc
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from sse_convert.mixers import changed_settings, mixer_from_dict

JSON_SCHEMA_VERSION = 1
_FOUND = "found_before"


class Report(Protocol):
    """What every command returns."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        ...

    def lines(self) -> list[str]:
        """The result for a person, one string per line."""
        ...


@contextlib.contextmanager
def found_before(report: Report) -> Iterator[None]:
    """Give a report to an error that comes after it, such as one of writing it: commands print both."""
    try:
        yield
    except Exception as error:
        vars(error)[_FOUND] = report
        raise


def found_by(error: BaseException) -> Report | None:
    """What was found before an error came, if something was."""
    report: Report | None = vars(error).get(_FOUND)
    return report


@dc.dataclass(frozen=True, slots=True)
class TextReport:
    """A small result: plain data, and the same for a person."""

    data: dict[str, Any]
    text: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return self.data

    def lines(self) -> list[str]:
        """The result for a person."""
        return self.text


@dc.dataclass(frozen=True, slots=True)
class FieldsReport:
    """A result whose fields are its plain data."""

    def to_dict(self) -> dict[str, Any]:
        """The fields; paths as text."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in dc.asdict(self).items()}


def json_ready(value: Any) -> Any:
    """`value` with only JSON types inside: dataclasses as mappings, paths as text, NaN and Inf as null.

    Raises:
        TypeError: something that has no JSON form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dc.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_ready(getattr(value, field.name)) for field in dc.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [json_ready(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A plain-text table: numbers to the right, text to the left, columns two spaces apart."""
    cells = [[cell if isinstance(cell, str) else format_cell(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]
    numeric = [bool(rows) and all(_is_number(text) for text in column) for column in zip(*cells, strict=True)] or [
        False for _ in header
    ]

    def line(texts: Sequence[str]) -> str:
        aligned = zip(texts, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in aligned).rstrip()

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in cells)]


def format_cell(value: object) -> str:
    """A table cell: `-` for None, yes/no, numbers with four significant digits."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def counted(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_bytes(count: float) -> str:
    """`10485760` -> `10.5 MB` (decimal units, as disks and file listings count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def time_in_words(hours: float) -> str:
    """Hours, or minutes of less than one."""
    if hours >= 1:
        return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours >= 1 / 60 else "below 1 min"


def format_rate(stage: dict[str, Any]) -> str:
    """A stage's learning rate, as a recipe stores it: one, or those given by group; and who steps, if not AdamW.

    Args:
        stage: as a recipe stores it; those written before there was a choice name no optimizer.
    """
    rate, muon = stage["lr"], ", Muon" if stage.get("optimizer") == "muon" else ""
    if not isinstance(rate, dict):
        return f"{rate:g}{muon}"
    return ", ".join(f"{value:g} ({group})" for group, value in rate.items() if value is not None) + muon


def format_cache(constant: int, growth: int) -> str:
    """What one sequence takes of a layer's cache: bytes whatever its length, and whether it grows."""
    return ", ".join([format_bytes(constant)] * bool(constant) + ["grows"] * bool(growth)) or "none"


def format_mixer(settings: dict[str, Any]) -> str:
    """`sse {num_partitions: 16}`: kind and settings other than the defaults, as a recipe writes them.

    Args:
        settings: what a checkpoint or a report stores of a mixer.

    Raises:
        ValueError: the kind or a field is unknown.
    """
    mixer = mixer_from_dict(settings)
    changed = changed_settings(mixer)
    if not changed:
        return f"{mixer.kind} (defaults)"
    return f"{mixer.kind} {format_flow(changed)}"


def format_flow(data: Any) -> str:
    """Plain data as one line of YAML: `{keep: [0, 7]}`."""
    return yaml.safe_dump(data, default_flow_style=True, sort_keys=False, width=math.inf).strip()


def format_number(count: float) -> str:
    """`1234567` -> `1.23M`, for parameters, tokens and FLOPs."""
    for unit in ("", "K", "M", "B", "T", "P"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}E"


def _is_number(text: str) -> bool:
    return text == "-" or text[:1].isdigit() or (text[:1] in "-+." and text[1:2].isdigit())
