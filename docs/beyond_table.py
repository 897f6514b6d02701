"""The table of needles beyond the trained length, from `benchmarks/quality/beyond_length*.json`."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from benchmarks.quality.beyond_length import MODELS, TIMES
from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "quality"
LONGER = tuple(times for times in TIMES if times > 1)
Setting = tuple[str, int, str]
"""teacher, tokens of training with the variant, and the variant"""


def beyond() -> str:
    """Needles found with other positions or sharper scores in softmax layers: the hybrid by seed, and its teacher."""
    found: dict[Setting, dict[tuple[int, str], list[str]]] = {}
    for setting, place, cell in _cells():
        found.setdefault(setting, {}).setdefault(place, []).append(cell)
    head = (
        "teacher",
        "trained so",
        "softmax layers",
        *(f"{times} times, {model}" for times in LONGER for model in MODELS),
    )
    rows = [
        (teacher, say.tokens(tokens) if tokens else "no", variant,
         *(", ".join(cells.get((times, model), ["-"])) for times in LONGER for model in MODELS))
        for (teacher, tokens, variant), cells in found.items()
    ]  # fmt: skip
    return "\n".join(table(head, rows))


def _cells() -> Iterator[tuple[Setting, tuple[int, str], str]]:
    """Share found of each part, with what it is about; longer rows alone."""
    for path in sorted(FOLDER.glob("beyond_length*.json")):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model, context = PurePosixPath(report["settings"]["model"]), report["settings"]["context"]
        name = f"`{'/'.join(model.parts[-2:])}`"
        for part in report["parts"]:
            if (times := part["length"] // context) in LONGER:
                setting = name, part["tokens"], part["variant"]
                yield setting, (times, part["model"]), f"{part['right'] / part['samples']:.0%} of {part['samples']}"


BLOCKS: Mapping[str, Callable[[], str]] = {"beyond-length": beyond}
