"""Figure and table of speed of the README."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.operator_cases import CUDNN, FLASH, OURS
from benchmarks.kernels.operator_targets import figure
from benchmarks.kernels.plot_hybrid import best, matching
from docs.examples import ROOT
from docs.markdown import table

KERNELS = ROOT / "benchmarks" / "kernels"
SHAPE = "0.6b"


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
    """The figure that `benchmarks.kernels.plot_gains` draws."""
    words = "memory and generation speed by context, softmax attention and a hybrid"
    return f"![{words}](docs/pages/assets/gains.png)"


BLOCKS: dict[str, Callable[[], str]] = {"figure": gains, "speed": speed}
