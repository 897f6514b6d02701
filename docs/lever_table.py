"""The table of levers of distillation, from `benchmarks/quality/levers/`."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "quality" / "levers"
ROWS = {
    "text": "text",
    "partitions": "text",
    "facts": "facts and tables",
    "facts-kept": "facts and tables, 4 and 9 kept",
}
"""training rows of each report"""
LENGTHS = (2048, 8192)
HEAD = ("rows", "lever", "first stage", "seeds", "KL, 2K", "KL, 8K", "needles asked",
        "one needle, 2K", "one of several, 2K", "one needle, 8K", "one of several, 8K")  # fmt: skip
Trial = Mapping[str, Any]
"""what a report says of one training"""


def levers() -> str:
    """Closeness and needles of each lever, means over its seeds."""
    rows = [(words, lever, *_cells(trials)) for words, lever, trials in _by_lever()]
    return "\n".join(table(HEAD, rows))


def _by_lever() -> Iterator[tuple[str, str, list[Trial]]]:
    """Levers of each report in the order of their first training."""
    for name, words in ROWS.items():
        found: dict[str, list[Trial]] = {}
        for trial in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["trials"]:
            found.setdefault(trial["lever"], []).append(trial)
        for lever, trials in found.items():
            yield words, lever, trials


def _cells(trials: Sequence[Trial]) -> tuple[str, ...]:
    tokens = trials[0]["tokens"]
    first = f"{tokens[0] / sum(tokens):.0%} of {say.tokens(sum(tokens))}"
    divergences = (say.number(fmean(trial["kl"][str(length)] for trial in trials)) for length in LENGTHS)
    asked = sorted({needles["samples"] for trial in trials for needles in trial["needles"]})
    shares = (_share(trials, length, one) for length, one in itertools.product(LENGTHS, (True, False)))
    return first, str(len(trials)), *divergences, " to ".join(map(str, asked)), *shares


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
