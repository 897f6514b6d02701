"""What the paper claims and what was measured here, from the JSON of `benchmarks/paper`."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "paper"
COMPARISONS = ("states", "ratio", "top_k", "keys", "gates", "parameters", "rows", "conversion")
"""JSON files that each hold one claim about recall"""


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def claims() -> str:
    """Claims with their outcomes."""
    head = ("claim of the paper", "where", "needles or accuracy", "loss of text")
    return "\n".join(table(head, [*_comparisons(), *_row_sparse(), *_growth()]))


def _comparisons() -> Iterator[tuple[str, ...]]:
    for name in COMPARISONS:
        report = _load(name)
        yield report["claim"], "one converted layer", report["verdicts"]["needles"], report["verdicts"]["loss"]


def _row_sparse() -> Iterator[tuple[str, ...]]:
    report = _load("mqar_topk_cpu")
    for claim in dict.fromkeys(entry["claim"] for entry in report["claims"]):
        outcomes = Counter(entry["outcome"] for entry in report["claims"] if entry["claim"] == claim)
        yield claim, "small models from scratch", ", ".join(f"{word} in {n}" for word, n in outcomes.items()), ""


def _growth() -> Iterator[tuple[str, ...]]:
    report = _load("growth")
    yield report["claim"], "stories260K, grown", "", report["verdicts"]["recovers"]


def propositions() -> str:
    """The propositions of Appendix A on random instances."""
    rows = [
        (str(check["proposition"]), check["statement"].replace("|", "\\|"), f"{check['violations']:,}",
         f"{check['instances']:,}")
        for check in _load("propositions")["checks"]
    ]  # fmt: skip
    return "\n".join(table(("", "statement", "broken in", "of random instances"), rows))


BLOCKS: dict[str, Callable[[], str]] = {"paper-claims": claims, "propositions": propositions}
