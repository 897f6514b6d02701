"""A table of several models. What was measured under other conditions gets a row of its own and a note, never a mix."""

import dataclasses as dc
from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Any

from sse_convert.report import table
from sse_convert.results.scores import ORDER, Conditions, Measure

_CELL = ("value", "low", "high")


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class BoardRow:
    """One quantity in one setting under one set of conditions."""

    quantity: str
    """what was measured"""
    setting: str
    """at which length, with how many keys ..."""
    mark: str
    """letter of the note that says how rows of this quantity and setting differ; empty where there is one row"""
    differing: Conditions
    """what sets the row apart"""
    conditions: Conditions
    """of all cells"""
    cells: tuple[Measure | None, ...]
    """one per column"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The table."""

    columns: tuple[str, ...]
    """names of the models"""
    rows: tuple[BoardRow, ...]
    """quantities together, settings in order"""
    notes: tuple[str, ...]
    """what is not comparable, and why"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "columns": list(self.columns),
            "rows": [
                {
                    "quantity": row.quantity,
                    "setting": row.setting,
                    "note": row.mark or None,
                    "conditions": dict(row.conditions),
                    "cells": [cell and {key: getattr(cell, key) for key in _CELL} for cell in row.cells],
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """The table for a terminal."""
        rows = []
        before = None
        for row in self.rows:
            quantity = "" if row.quantity == before else row.quantity
            before = row.quantity
            setting = f"{row.setting} [{row.mark}]" if row.mark else row.setting
            rows.append((quantity, setting.strip(), *(cell and cell.text for cell in row.cells)))
        return [*table(("", "", *self.columns), rows), *(["", *self.notes] if self.notes else [])]


def make_board(columns: Sequence[tuple[str, Iterable[Measure]]]) -> Board:
    """Set models side by side.

    Args:
        columns: name and figures of each model; of two figures for one cell the first stays.
    """
    cells: dict[tuple[str, str], dict[Conditions, dict[int, Measure]]] = {}
    for i, (_, measures) in enumerate(columns):
        for measure in measures:
            places = cells.setdefault((measure.quantity, measure.setting), {})
            places.setdefault(measure.conditions, {}).setdefault(i, measure)
    letters: dict[Conditions, str] = {}
    rows: list[BoardRow] = []
    for (quantity, setting), places in sorted(cells.items(), key=_place):
        differing = _differing(list(places))
        for conditions, found in places.items():
            own = tuple(pair for pair in conditions if pair[0] in differing)
            rows.append(
                BoardRow(
                    quantity=quantity,
                    setting=setting,
                    mark=letters.setdefault(own, _letter(len(letters))) if own else "",
                    differing=own,
                    conditions=conditions,
                    cells=tuple(found.get(i) for i in range(len(columns))),
                )
            )
    return Board(columns=tuple(name for name, _ in columns), rows=tuple(rows), notes=_notes(rows))


def _place(item: tuple[tuple[str, str], dict[Conditions, dict[int, Measure]]]) -> tuple[int, tuple[str, int, int]]:
    """Where a quantity in a setting stands."""
    (quantity, _), places = item
    first = next(iter(next(iter(places.values())).values()))
    return ORDER.index(quantity), first.order


def _letter(i: int) -> str:
    return ascii_lowercase[i] if i < len(ascii_lowercase) else str(i)


def _differing(conditions: list[Conditions]) -> list[str]:
    """Names of the conditions that are not the same in all."""
    names = dict.fromkeys(name for each in conditions for name, _ in each)
    return [name for name in names if len({dict(each).get(name) for each in conditions}) > 1]


def _notes(rows: Sequence[BoardRow]) -> tuple[str, ...]:
    """One line for each set of conditions that keep rows apart."""
    places: dict[tuple[str, str], list[BoardRow]] = {}
    for row in rows:
        if row.mark:
            places.setdefault((row.quantity, row.setting), []).append(row)
    quantities: dict[str, dict[str, None]] = {}
    for (quantity, _), apart in places.items():
        parts = (f"[{row.mark}] {', '.join(' '.join(pair) for pair in row.differing)}" for row in apart)
        quantities.setdefault("; ".join(parts), {})[quantity] = None
    return tuple(f"not comparable: {', '.join(names)}: {parts}" for parts, names in quantities.items())
