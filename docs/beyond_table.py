"""The table of needles beyond the trained length, from `benchmarks/quality/beyond/`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from benchmarks.quality.beyond_length import MODELS, TIMES
from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "quality" / "beyond"
LONGER = tuple(times for times in TIMES if times > 1)
Setting = tuple[str, int, str]
"""teacher, tokens of training with the variant, and the variant"""
Place = tuple[str, int]
"""model, and how many times as long as its context rows are"""
Part = Mapping[str, Any]
"""what a report says of one of them"""


def beyond() -> str:
    """Needles found with other positions or sharper scores, of several seeds the lowest and the highest share."""
    found: dict[Setting, dict[Place, list[Part]]] = {}
    for setting, place, part in parts():
        found.setdefault(setting, {}).setdefault(place, []).append(part)
    models = [name for name in MODELS if any(place[0] == name for places in found.values() for place in places)]
    head = ("teacher", "trained so", "positions, scores", "needles asked", "seeds", *models)
    rows = [
        (teacher, say.tokens(tokens) if tokens else "no", variant, _asked(places), str(max(map(len, places.values()))),
         *(_shares(places, model) for model in models))
        for (teacher, tokens, variant), places in found.items()
    ]  # fmt: skip
    return "\n".join(table(head, rows))


def parts() -> Iterator[tuple[Setting, Place, Part]]:
    """What reports hold, with what it is about; longer rows alone."""
    for path in sorted(FOLDER.glob("*.json")):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model, context = PurePosixPath(report["settings"]["model"]), report["settings"]["context"]
        name = f"`{'/'.join(model.parts[-2:])}`"
        for part in report["parts"]:
            if (times := part["length"] // context) in LONGER:
                yield (name, part["tokens"], part["variant"]), (part["model"], times), part


def _asked(places: Mapping[Place, Sequence[Part]]) -> str:
    counts = {part["samples"] for found in places.values() for part in found}
    return _range(sorted(map(str, counts), key=int))


def _shares(places: Mapping[Place, Sequence[Part]], model: str) -> str:
    """Of one model, by length."""
    if not any(place[0] == model for place in places):
        return "-"
    by_length = (places.get((model, times), ()) for times in LONGER)
    return " / ".join(_range([f"{share:.0%}" for share in sorted(map(_share, found))]) for found in by_length)


def _share(part: Part) -> float:
    share: float = part["right"] / part["samples"]
    return share


def _range(ordered: Sequence[str]) -> str:
    if not ordered:
        return "-"
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


BLOCKS: Mapping[str, Callable[[], str]] = {"beyond-length": beyond}
