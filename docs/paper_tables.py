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
CLAIMED = {"states": "states", "ratio": "states, k/n constant", "top_k": "partitions per token", "keys": "keys",
           "gates": "gates", "parameters": "parameters", "rows": "updated rows", "conversion": "mixer"}  # fmt: skip
"""what the variants of a file differ in, in words"""


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


def variants() -> str:
    """Every variant of the claims about recall: means over two seeds."""
    rows = []
    for name in COMPARISONS:
        figures = _load(name)["figures"]
        for variant, found in figures.items():
            if variant != "teacher":
                needles = ", ".join(f"{found[f'needles_{length}']:.0%}" for length in (2048, 8192))
                losses = ", ".join(f"{found[f'loss_{length}']:.3f}" for length in (2048, 8192))
                first = variant == next(key for key in figures if key != "teacher")
                rows.append(
                    (CLAIMED[name] if first else "", variant, needles, losses, _megabytes(found["state_bytes"]))
                )
    return "\n".join(table(("what differs", "variant", "needles, 2K, 8K", "loss above the teacher", "state"), rows))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def recall() -> str:
    """Accuracy of dense and row-sparse models from scratch, means over six seeds."""
    cells = _load("mqar_topk_cpu")["cells"]
    widths = sorted({cell["width"] for cell in cells})
    by_key = {(c["mixer"], c["noise"], c["width"], c["rows"] is not None): c["accuracy"]["mean"] for c in cells}
    rows = [
        (f"{mixer}, {'noise' if noise else 'zeros'}",
         *(", ".join(f"{by_key[mixer, noise, width, sparse]:.0%}" for sparse in (False, True)) for width in widths))
        for mixer, noise in dict.fromkeys((cell["mixer"], cell["noise"]) for cell in cells)
    ]  # fmt: skip
    return "\n".join(table(("dense, row-sparse", *(f"width {width}" for width in widths)), rows))


def propositions() -> str:
    """The propositions of Appendix A on random instances."""
    rows = [
        (str(check["proposition"]), check["statement"].replace("|", "\\|"), f"{check['violations']:,}",
         f"{check['instances']:,}")
        for check in _load("propositions")["checks"]
    ]  # fmt: skip
    return "\n".join(table(("", "statement", "broken in", "of random instances"), rows))


BLOCKS: dict[str, Callable[[], str]] = {
    "paper-claims": claims,
    "paper-variants": variants,
    "paper-recall": recall,
    "propositions": propositions,
}
