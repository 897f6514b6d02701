"""The table of levers of distillation, from `benchmarks/quality/levers/`."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table
from docs.wording_tables import SEVERAL, SINGLE, TAUGHT_BEST, TWO_BEST, scores

FOLDER = ROOT / "benchmarks" / "quality" / "levers"
ROWS = {
    "text": "text",
    "partitions": "text",
    "facts": "facts and tables",
    "facts-kept": "facts and tables, 4 and 9 kept",
}
"""training rows of each report"""
BEFORE = {"facts": TAUGHT_BEST, "facts-kept": TWO_BEST}
"""runs without a change, of reports that have none"""
LENGTHS = (2048, 8192)
HEAD = ("rows", "lever", "first stage", "seeds", "KL, 2K", "KL, 8K", "of each needle",
        "one needle, 2K", "one of several, 2K", "one needle, 8K", "one of several, 8K")  # fmt: skip
Trial = Mapping[str, Any]
"""what a report says of one training"""


def levers() -> str:
    """Closeness and needles of each lever, means over its seeds."""
    return "\n".join(table(HEAD, list(_lines())))


def _lines() -> Iterator[tuple[str, ...]]:
    """Levers of each report in the order of their first training, after the run without a change."""
    for name, words in ROWS.items():
        found: dict[str, list[Trial]] = {}
        for trial in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["trials"]:
            found.setdefault(trial["lever"], []).append(trial)
        if name in BEFORE:
            (alike,) = found.values()  # tokens are those of the run without a change
            yield words, "as it is", _first(alike), *_before(BEFORE[name])
        for lever, trials in found.items():
            yield words, lever, _first(trials), *_cells(trials)


def _first(trials: Sequence[Trial]) -> str:
    """Share of the tokens that the first stage has."""
    tokens = trials[0]["tokens"]
    return f"{tokens[0] / sum(tokens):.0%} of {say.tokens(sum(tokens))}"


def _before(run: str) -> tuple[str, ...]:
    rows = [say.picked([run], length)[0] for length in LENGTHS]
    (asked,) = {row.asked([kind]) for row in rows for kind in SINGLE if hasattr(row, kind)}
    found = (scores(row, tasks) for row in rows for tasks in (SINGLE, SEVERAL))
    shares = (f"{right / of:.0%}" for right, of in found)
    return "1", *(say.divergence([row]) for row in rows), str(asked), *shares


def _cells(trials: Sequence[Trial]) -> tuple[str, ...]:
    divergences = (say.number(fmean(trial["kl"][str(length)] for trial in trials)) for length in LENGTHS)
    (asked,) = {needles["samples"] for trial in trials for needles in trial["needles"]}
    shares = (_share(trials, length, one) for length, one in itertools.product(LENGTHS, (True, False)))
    return str(len(trials)), *divergences, str(asked), *shares


def _share(trials: Sequence[Trial], length: int, one: bool) -> str:
    """Needles found at a length, single ones or one of several."""
    found = [
        needles["accuracy"]
        for trial in trials
        for needles in trial["needles"]
        if needles["length"] == length and (needles["keys"] == 1) == one
    ]
    return f"{fmean(found):.0%}"


BLOCKS: Mapping[str, Callable[[], str]] = {"levers": levers}
