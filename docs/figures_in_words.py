"""Cells of tables: rows of `results.csv` as people read them."""

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median

from benchmarks.quality import rows
from benchmarks.quality.rows import KINDS, Row
from docs.examples import ROOT


@cache
def results() -> tuple[Row, ...]:
    """All rows of `results.csv`."""
    return tuple(rows.read(ROOT / "benchmarks/quality/results.csv"))


def picked(runs: Iterable[str], context: int, model: str = "trained") -> list[Row]:
    """The rows of several runs at one context length."""
    return [rows.pick(results(), run, context, model) for run in runs]


def variant(run: str, name: str, context: int, *, seed: int = 0, model: str = "trained") -> Row:
    """The row of a variant of `swapped_layers`, by the end of its name.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = [
        row
        for row in results()
        if (row.run, row.context, row.seed, row.model) == (run, context, seed, model)
        and row.other_layers.partition(": ")[2] == name
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of variant {name!r} of {run}, expected 1")
    return found[0]


def gap(chosen: Sequence[Row]) -> str:
    """Loss above the teacher: with its 95% interval, or median and range of several seeds."""
    values = [row.gap for row in chosen if row.gap is not None]
    if not values:
        return ""
    if len(values) > 1:
        return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"
    (row,) = (row for row in chosen if row.gap is not None)
    half = None if row.gap_high is None else row.gap_high - values[0]
    return number(values[0]) + ("" if half is None else f" ± {half:.3f}")


def divergence(chosen: Sequence[Row]) -> str:
    """KL divergence from the teacher, or median of several seeds."""
    values = [row.kl for row in chosen if row.kl is not None]
    return number(median(values)) if values else ""


def needles(chosen: Sequence[Row], kinds: Iterable[str] = KINDS, *, teacher: bool = False) -> str:
    """Share of needles found, of several seeds together."""
    kinds = tuple(kinds)
    asked = sum(row.asked(kinds) for row in chosen)
    return f"{sum(row.found(teacher=teacher, kinds=kinds) for row in chosen) / asked:.0%}" if asked else ""


def number(value: float) -> str:
    """Three decimals, without a minus before zero."""
    return f"{value:.3f}".replace("-0.000", "0.000")


def megabytes(count: int | None) -> str:
    """Bytes in decimal megabytes."""
    return "" if count is None else f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def tokens(count: int | None) -> str:
    """Training tokens in millions."""
    return "" if count is None else f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}K"


def seeds(chosen: Sequence[Row]) -> str:
    """How many seeds there are."""
    words = ("no", "one", "two", "three", "four", "five")
    return f"{words[len(chosen)]} seed{'s' if len(chosen) > 1 else ''}"
