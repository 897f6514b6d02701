"""Tables of the page on speed, from the JSON of `benchmarks/kernels`."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kernels import operator_targets, plot_hybrid
from benchmarks.kernels.operator_cases import (
    CUDNN,
    FLASH,
    GDN_ENGINE,
    GLA,
    KDA_ENGINE,
    OURS,
    QLA_ENGINE,
    VARLEN,
)
from benchmarks.kernels.plot_hybrid import best, matching
from docs.markdown import shown, table
from docs.readme_tables import load, operator_ms

CANDIDATES = {OURS: "SSE here", VARLEN: "SSE as published", GLA: "`chunk_gla`", FLASH: "flash attention",
              CUDNN: "cuDNN attention"}  # fmt: skip
WORK = (
    ("training at 32K, tokens/s", "training", 2**15, 1, "tokens_per_s"),
    ("training at 128K, tokens/s", "training", 2**17, 1, "tokens_per_s"),
    ("reading 128K, tokens/s", "prefill", 2**17, None, "prefill_tokens_per_s"),
    ("generation after 8K, tokens/s", "decoding", 2**13, 1, "tokens_per_s"),
    ("generation after 128K, tokens/s", "decoding", 2**17, 1, "tokens_per_s"),
    ("generation after 128K, batch 4, tokens/s", "decoding", 2**17, 4, "tokens_per_s"),
    ("memory of generation after 128K, GiB", "decoding", 2**17, 1, "peak_gib"),
)
"""what was measured of whole models: section, context, batch (None where it is always one row), figure"""
LARGE = 0.08
"""share of a call's time from which on a kernel is shown"""
Counted = tuple[str, dict[str, Any]]
"""a kernel of a shape, in words, and its counters"""


def operator() -> str:
    """Milliseconds of the operator and its peers, forward / forward and backward."""
    cells = load("operator_h200.json")["cells"]

    def times(candidate: str, tokens: int) -> str:
        found = (operator_ms(cells, candidate, tokens, way) for way in ("forward", "forward_backward"))
        return " / ".join("" if value is None else f"{value:.3g}" for value in found)

    rows = [(f"{tokens:,}", *(times(name, tokens) for name in CANDIDATES)) for tokens in (2**10, 2**13, 2**16, 2**18)]
    return "\n".join(table(("tokens", *CANDIDATES.values()), rows))


def engines() -> str:
    """Milliseconds of the operator over the delta rule, ours and with functions of libraries inside."""
    names = {
        OURS: "SSE here",
        KDA_ENGINE: "`chunk_kda`",
        GDN_ENGINE: "`chunk_gated_delta_rule`",
        QLA_ENGINE: "FlashQLA",
    }
    found: dict[str, dict[str, str]] = {}
    for cell in load("engines_h200.json")["cells"]:
        decays = "a head" if cell["scalar"] else "a channel"
        documents = "" if cell["sequences"] == 2 else f", {cell['sequences']} documents"
        times = (_fastest(cell[way]) for way in ("forward", "forward_backward"))
        case = f"{cell['note']}{documents}, a decay for {decays}"
        found.setdefault(case, {})[cell["candidate"]] = " / ".join(f"{ms:.3g}" for ms in times)
    rows = [(case, *(own.get(name, "") for name in names)) for case, own in found.items()]
    return "\n".join(table(("32,768 tokens", *names.values()), rows))


def _fastest(timed: dict[str, Any]) -> float:
    """Eager or as a CUDA graph, whichever is faster."""
    return float(min(timed[way]["ms"] for way in ("eager", "graph") if isinstance(timed[way], dict)))


def models() -> str:
    """A hybrid and its teacher, in the shapes of two Qwen3 models."""
    report = load("hybrid_h200.json")
    return "\n".join(
        table(
            ("", "0.6B: hybrid / teacher", "8B: hybrid / teacher"),
            [(what, *(_pair(report, shape, *how) for shape in ("0.6b", "8b"))) for what, *how in WORK],
        )
    )


def _pair(report: dict[str, Any], shape: str, section: str, context: int, batch: int | None, name: str) -> str:
    most = name.endswith("tokens_per_s")
    case = {"shape": shape, "context": context} | ({"batch": batch} if batch else {})
    values = [
        best(matching(report, section, **case, model=model), name, most=most) for model in ("hybrid-kv", "teacher")
    ]
    if None in values:
        return "not measured"
    hybrid, teacher = (value or 0.0 for value in values)
    digits = ",.0f" if most else ".1f"
    return f"{hybrid:{digits}} / {teacher:{digits}} ({hybrid / teacher:.2f}x)"


def speed_goals() -> str:
    """How many goals of speed are met, and those that are missed."""
    every = [*_operator_goals(), *_model_goals()]
    missed = [cells for *cells, met in every if not met]
    head = ("missed goal", "case", "measured", "asked for")
    return "\n".join([f"Met: {len(every) - len(missed)} of {len(every)} goals.", "", *table(head, missed)])


def _operator_goals() -> Iterator[tuple[str, str, str, str, bool]]:
    for v in operator_targets.verdicts(load("operator_h200.json")["cells"]):
        case = ", ".join(filter(None, (v.case, v.direction.replace("_", " and "))))
        measured = "not measured" if v.ratio is None else f"{v.ratio:.3g}{v.unit}"
        yield v.target, case, measured, _asked(v.limit, v.unit, least=v.at_least), v.met


def _model_goals() -> Iterator[tuple[str, str, str, str, bool]]:
    for shape, hybrid, batch, target, ratio in plot_hybrid.verdicts(load("hybrid_h200.json")):
        if (hybrid, shape) in (("hybrid-kv", "0.6b"), ("hybrid-kv", "8b")):
            case, asked = f"{shape.upper()} shape, batch {batch}", _asked(target.limit, "x", least=target.least)
            yield f"{target.what}, of the teacher's", case, f"{ratio:.2f}x", asked, target.met(ratio)


def counters() -> str:
    """What Nsight Compute counted of the operator's larger kernels, forward and backward."""
    record = load("counters_h200.json")

    def percent(*names: str) -> Callable[[Counted], str]:
        return lambda row: ", ".join(f"{row[1]['percent'][name]:.0f}%" for name in names)

    columns: dict[str, Callable[[Counted], str]] = {
        "shape, kernel": lambda row: row[0],
        "ms": lambda row: f"{row[1]['total_ms']:.2f} in {row[1]['launches']}",
        "DRAM, L2, L1": percent("dram", "l2", "l1"),
        "multiprocessors": percent("multiprocessor"),
        "warps held": percent("occupancy"),
        "no more for lack of": lambda row: " and ".join(row[1]["held_back_by"]),
    }
    rows = (row for shape, call in record["shapes"].items() for row in _counted(shape, call))
    return f"{shown(columns, rows)}\n\nCommit {record['commit']}, {record['device']}."


def _counted(shape: str, call: dict[str, Any]) -> Iterator[Counted]:
    kernels = call["kernels"]
    whole = sum(kernel["total_ms"] for kernel in kernels.values())
    for name, kernel in kernels.items():
        if kernel["total_ms"] >= LARGE * whole:
            yield f"{shape}, {call['tokens'] >> 10}K, `{name}`", kernel


def _asked(limit: float, unit: str, *, least: bool) -> str:
    return f"{'at least' if least else 'at most'} {limit:.3g}{unit}"


BLOCKS: dict[str, Callable[[], str]] = {
    "operator": operator,
    "engines": engines,
    "models": models,
    "speed-goals": speed_goals,
    "counters": counters,
}
