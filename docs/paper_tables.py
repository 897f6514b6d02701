"""What the paper claims and what was measured here, from the JSON of `benchmarks/paper`."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.paper.comparisons import COMPARISONS
from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "paper"
STATES = ROOT / "benchmarks" / "analysis" / "beside_gla.json"
CLAIMED = {
    "states": "states", "ratio": "states, k/n constant", "top_k": "partitions per token", "keys": "keys",
    "keys_paper": "keys, N = 4", "gates": "gates", "parameters": "parameters, N = 4",
    "parameters_16": "parameters, N = 16",
    "rows": "updated rows", "conversion": "mixer", "hybrid": "mixer, eight layers",
}  # fmt: skip
"""what the variants of a comparison differ in, in words"""
SCRATCH = {"mqar_topk_cpu": "small models from scratch", "mqar_long": "rows of 128 tokens, 10,000 steps"}
"""figures of row-sparse updates, and where they were made"""


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def claims() -> str:
    """Claims, what was found, and the outcomes."""
    head = ("claim of the paper", "where", "ours", "verdict on recall", "verdict on loss")
    return "\n".join(table(head, [*_comparisons(), *_row_sparse(), *_growth(), *_states(), *_scratch()]))


def _comparisons() -> Iterator[tuple[str, ...]]:
    for name, comparison in COMPARISONS.items():
        where = "one converted layer" if len(comparison.layers) == 1 else "eight converted layers"
        if not (FOLDER / f"{name}.json").is_file():
            yield comparison.claim, where, "not run yet", "undecided", "undecided"
            continue
        found = _load(name)["verdicts"]
        recall = "answers" if "answers" in found else "needles"
        yield comparison.claim, where, _difference(found, recall), found[recall], found["loss"]


def _difference(found: dict[str, Any], kind: str) -> str:
    """The first difference that a claim is about, at each length."""
    rows = [row for row in found["measures"] if row["measure"] == kind]
    unit, digits, name = (100, 0, "points") if kind == "needles" else (1, 3, "nats")
    first = [row["ahead"][0] for row in rows]
    values = ", ".join(f"{unit * d['by']:+.{digits}f} ± {unit * d['doubt']:.{digits}f}" for d in first)
    return f"{first[0]['better']} over {first[0]['worse']}: {values} {name}"


def _row_sparse() -> Iterator[tuple[str, ...]]:
    for file, where in SCRATCH.items():
        by_claim: dict[str, list[dict[str, Any]]] = {}
        for entry in _load(file)["claims"]:
            by_claim.setdefault(entry["claim"], []).append(entry)
        for claim, entries in by_claim.items():
            ahead, behind, pairs = (sum(entry[key] for entry in entries) for key in ("ahead", "behind", "pairs"))
            outcomes = Counter(entry["outcome"] for entry in entries)
            words = ", ".join(f"{word} in {n}" for word, n in outcomes.items())
            yield claim, where, f"true of {ahead}, false of {behind} of {pairs} pairs of models", words, ""


def _growth() -> Iterator[tuple[str, ...]]:
    report = _load("growth")
    worst = max(-way["better_by"] for way in report["verdicts"]["ways"])
    found = f"at worst {worst:+.4f} nats beside the model as it was"
    yield report["claim"], "stories260K, grown", found, "", report["verdicts"]["recovers"]


def _states() -> Iterator[tuple[str, ...]]:
    tokens, rows = _judged_states()
    where = f"states after {tokens:,} tokens of training" if tokens else "states after calibration"
    for row in rows:
        found = f"{_number(row['sse'])} and {_number(row['gla'])}, true in {row['true']} of {row['layers']} layers"
        yield row["claim"], where, found, row["outcome"], ""


def _judged_states() -> tuple[int, list[dict[str, Any]]]:
    """The most training that there is, in tokens, and sentences about the states after it."""
    by_tokens: dict[str, list[dict[str, Any]]] = json.loads(STATES.read_text(encoding="utf-8"))["sentences"]
    most = max(map(int, by_tokens))
    return most, by_tokens[str(most)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def _scratch() -> Iterator[tuple[str, ...]]:
    report = _load("from_scratch")
    own = report["verdict"]["sse_over_gla"]
    doubt = "unknown, one seed" if own["doubt"] is None else f"{own['doubt']:.3f}"
    found = f"SSE over GLA: {own['by']:+.3f} nats ± {doubt}"
    yield report["claim"], "small models from scratch", found, "", report["verdict"]["outcome"]


def scratch() -> str:
    """Models from random weights: held-out loss, means over seeds."""
    report = _load("from_scratch")
    names = list(dict.fromkeys(run["name"] for run in report["runs"]))
    rows = []
    for name in names:
        own = [run for run in report["runs"] if run["name"] == name]
        losses = ", ".join(f"{run['loss']:.3f}" for run in own)
        rows.append((name, f"{own[0]['parameters'] / 1e6:.2f}M", f"{own[0]['tokens']:,}", losses))
    return "\n".join(table(("all layers", "parameters", "tokens", "held-out loss by seed"), rows))


def variants() -> str:
    """Every variant of the claims about recall that has been run: means over seeds."""
    rows = []
    for name in (name for name in COMPARISONS if (FOLDER / f"{name}.json").is_file()):
        figures = {variant: found for variant, found in _load(name)["figures"].items() if variant != "teacher"}
        for i, (variant, found) in enumerate(figures.items()):
            measured = (_pair(found, "needles", ".0%"), _pair(found, "answers", ".2f"), _pair(found, "loss", ".3f"))
            rows.append(("" if i else CLAIMED[name], variant, *measured, _megabytes(found["state_bytes"])))
    head = ("what differs", "variant", "needles, 2K, 8K", "loss of answers", "loss above the teacher", "state")
    return "\n".join(table(head, rows))


def _pair(found: dict[str, float], kind: str, form: str) -> str:
    """A measure at both lengths, as far as it was taken."""
    keys = (f"{kind}_{length}" for length in (2048, 8192))
    return ", ".join(format(found[key], form) for key in keys if key in found) or "-"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def recall() -> str:
    """Accuracy of dense and row-sparse models from scratch, means over seeds."""
    every = [(where, cell) for file, where in SCRATCH.items() for cell in _load(file)["cells"]]
    widths = sorted({cell["width"] for _, cell in every})
    by_row: dict[tuple[str, str, str], dict[int, list[str]]] = {}
    for where, cell in sorted(every, key=lambda pair: pair[1]["rows"] is not None):
        row = by_row.setdefault((cell["mixer"], "noise" if cell["noise"] else "zeros", where), {})
        row.setdefault(cell["width"], []).append(f"{cell['accuracy']['mean']:.0%}")
    rows = [(f"{mixer}, {between}", where, *(", ".join(row.get(width, "-")) for width in widths))
            for (mixer, between, where), row in by_row.items()]  # fmt: skip
    return "\n".join(table(("dense, row-sparse", "models", *(f"width {width}" for width in widths)), rows))


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
    "paper-scratch": scratch,
}
