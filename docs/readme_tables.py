"""Figure and tables of the README: what conversion keeps, and what is faster."""

import dataclasses as dc
import json
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.operator_cases import CUDNN, FLASH, OURS
from benchmarks.kernels.operator_targets import figure
from benchmarks.kernels.plot_hybrid import best, matching
from benchmarks.quality.rows import Row
from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table

SEEDS_0_7 = tuple(f"keep-0-7_seed{seed}" for seed in range(5))
"""two layers that `select` chose"""
SEEDS_4_9 = ("keep-4-9_muon_8k-steps", "keep-4-9_seed1", *(f"keep-4-9_muon_8k-steps_seed{seed}" for seed in (2, 3, 4)))
"""two layers that retrieve nothing"""
RUNS_32K = ("context-32k_muon", "context_32k_muon", "context_32k_low")
"""three runs from two starts"""
KERNELS = ROOT / "benchmarks" / "kernels"
SHAPE = "0.6b"


@dc.dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the quality table."""

    what: str
    kept: str
    context: int
    runs: tuple[str, ...]
    needle_runs: tuple[str, ...] = ()
    """runs with more needles, where others measured them"""
    windows: tuple[str, ...] = ()
    """windows alone in the same layers"""
    window_needles: tuple[str, ...] = ()


LINES = (
    Line(what="chosen by `select`", kept="2 of 10", context=8192, runs=SEEDS_0_7,
         windows=("keep-0-7_window_seed0",)),
    Line(what="two that retrieve nothing", kept="2 of 10", context=8192, runs=SEEDS_4_9,
         windows=("keep-4-9_window",)),
    Line(what="none", kept="0 of 10", context=8192, runs=("keep-none_muon_8k-steps",)),
    Line(what="as row two, then rows of 32K", kept="2 of 10", context=32768,
         runs=RUNS_32K),
    Line(what="second teacher, chosen by `select`", kept="2 of 6", context=2048,
         runs=("second-teacher_muon",), needle_runs=("second_teacher_500_cpu",),
         windows=("second-teacher_muon_window",), window_needles=("second_teacher_window_500",)),
)  # fmt: skip


def quality() -> str:
    """Five conversions beside windows alone in the same layers."""
    head = ("softmax layers", "number", "training tokens", "loss above teacher", "needles found (teacher)",
            "windows alone: loss, needles", "cache at 128K (teacher)")  # fmt: skip
    notes = (
        "Loss is in nats per token at 8K tokens; row four at 32K, four times the teacher's context; row five at 2K.",
        "Rows one and two are medians and ranges of five seeds, row four of three runs, the others one seed with its "
        "95% interval.",
        "Windows of row two had AdamW and steps of 16K tokens, the hybrid Muon and 8K.",
        "One NVIDIA H200; needles of row five's hybrid on a CPU. Commits, seeds and commands: "
        "`benchmarks/quality/results.csv`.",
    )
    return "\n".join([*table(head, [_line(line) for line in LINES]), "", *notes])


def _line(line: Line) -> tuple[str, ...]:
    chosen = say.picked(line.runs, line.context)
    asked = say.picked(line.needle_runs or line.runs, line.context)
    windows = say.picked(line.windows, line.context)
    found = say.picked(line.window_needles or line.windows, line.context)
    cache, teacher = chosen[0].cache_bytes_128k, chosen[0].teacher_cache_bytes_128k
    return (
        line.what,
        line.kept,
        say.tokens(chosen[0].tokens),
        say.gap(chosen),
        f"{say.needles(asked)} ({say.needles(asked, teacher=True)})",
        f"{_plain_gap(windows[0])}, {say.needles(found)}" if windows else "not measured",
        f"{say.megabytes(cache)} ({say.megabytes(teacher)})",
    )


def _plain_gap(row: Row) -> str:
    assert row.gap is not None
    return say.number(row.gap)


def load(name: str) -> dict[str, Any]:
    """A JSON file of `benchmarks/kernels`."""
    content: dict[str, Any] = json.loads((KERNELS / name).read_text(encoding="utf-8"))
    return content


def speed() -> str:
    """Five measurements of the operator and of a hybrid, beside softmax attention."""
    operator, models = load("operator_h200.json"), load("hybrid_h200.json")
    cells = operator["cells"]
    lines = [_operator(cells, 2**10), _operator(cells, 2**16)]
    for what, section, context, name, unit in (
        ("training at 32K", "training", 2**15, "tokens_per_s", "tokens/s"),
        ("generation after 128K", "decoding", 2**17, "tokens_per_s", "tokens/s"),
        ("memory after 128K", "decoding", 2**17, "peak_gib", "GiB"),
    ):
        lines.append(_model(models, what, section, context, name, unit))
    commits = sorted(
        {env["commit"] for report in (operator, models) for env in (*report["earlier"], report["environment"])}
    )
    notes = (
        "Both sides take their fastest kernels; batch 1, bf16. The hybrid has random weights, and SSE in four of five "
        "layers.",
        f"{models['environment']['device']}, torch {models['environment']['torch']}, commits {', '.join(commits)}.",
    )
    return "\n".join([*table(("", "SSE or hybrid", "softmax", ""), lines), "", *notes])


def operator_ms(cells: list[dict[str, Any]], candidate: str, tokens: int, direction: str) -> float | None:
    """Milliseconds of a candidate, as a CUDA graph or eager, whichever is faster."""
    found = [figure(cells, candidate, path, tokens=tokens, direction=direction) for path in ("eager.ms", "graph.ms")]
    return min(filter(None, found), default=None)


def _operator(cells: list[dict[str, Any]], tokens: int) -> tuple[str, ...]:
    ours, *peers = (operator_ms(cells, name, tokens, "forward_backward") for name in (OURS, FLASH, CUDNN))
    softmax = min(filter(None, peers))
    assert ours is not None
    what = f"operator, {tokens // 1024}K tokens, forward and backward"
    return what, f"{ours:.2g} ms", f"{softmax:.2g} ms", _times(softmax / ours)


def _model(report: dict[str, Any], what: str, section: str, context: int, name: str, unit: str) -> tuple[str, ...]:
    most = name == "tokens_per_s"
    hybrid, teacher = (
        best(matching(report, section, shape=SHAPE, context=context, batch=1, model=model), name, most=most)
        for model in ("hybrid-kv", "teacher")
    )
    assert hybrid is not None
    assert teacher is not None
    digits = ",.0f" if most else ".1f"
    ratio = _times(hybrid / teacher) if most else f"{hybrid / teacher:.0%} of it"
    return f"Qwen3-0.6B shape: {what}", f"{hybrid:{digits}} {unit}", f"{teacher:{digits}} {unit}", ratio


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slow"


def gains() -> str:
    """The figure that `benchmarks.quality.plots` draws."""
    words = "memory by context, needles found and generation speed by context, softmax attention and hybrids"
    return f"![{words}](docs/pages/assets/gains.png)"


BLOCKS: dict[str, Callable[[], str]] = {"figure": gains, "quality": quality, "speed": speed}
