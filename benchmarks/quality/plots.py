"""Three figures: all whole models and quality against memory, from `results.csv`, and memory and speed by context.

    python -m benchmarks.quality.plots

Writes `runs.png` and `frontier.png` here and `gains.png`, from `benchmarks/kernels/hybrid_h200.json`, beside the
documentation's pages.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.kernels.plot_hybrid import best, matching
from benchmarks.quality import rows
from benchmarks.quality.rows import Row

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
GAINS = ROOT / "docs" / "pages" / "assets" / "gains.png"
SPEED = ROOT / "benchmarks" / "kernels" / "hybrid_h200.json"
TEACHER = "teacher-qwen3-32m"
CONTEXT = 8192
KINDS = {"number_x1": "a number", "number_x8": "a number of eight", "code_x1": "a code", "code_x8": "a code of eight"}
"""columns of needles in words"""
STYLES = {"softmax": "#444444", "hybrid": "#0072b2"}
"""colours of the figure of gains"""


def whole_models(table: Iterable[Row]) -> list[Row]:
    """Trained whole models of the 32M teacher at 8K tokens that were asked for needles, the smallest loss first."""
    found = (row for row in table if (row.teacher, row.model, row.context) == (TEACHER, "trained", CONTEXT))
    measured = (row for row in found if row.gap is not None and row.kl is not None and row.cache_bytes is not None)
    chosen = [row for row in measured if all(row.asked([kind]) for kind in KINDS)]
    return sorted((row for row in chosen if "rows of 32K" not in row.training), key=lambda row: row.gap or 0.0)


def label(row: Row) -> str:
    """What tells a model from others, in one line."""
    short = row.other_layers.replace(" tokens", "")
    steps = ", ".join(row.training.split(", ")[:2]).replace(" tokens", "").replace("steps of ", "")
    return f"softmax {row.softmax_layers} | {short} | {steps}, {(row.tokens or 0) / 1e6:.0f}M, seed {row.seed}"


def draw_runs(table: Sequence[Row], png: Path) -> None:
    """One line a model: loss above the teacher with its interval, and needles of each kind."""
    chosen = whole_models(table)
    figure, (left, right) = _figure((15, 1.2 + 0.23 * len(chosen)), width_ratios=(1, 1))
    for y, row in enumerate(chosen):
        low, middle, high = (value or 0.0 for value in (row.gap_low, row.gap, row.gap_high))
        left.errorbar(middle, y, xerr=[[middle - low], [high - middle]], fmt="o", color="C0")
    for i, (kind, name) in enumerate(KINDS.items()):
        right.plot([_share(row, kind) for row in chosen], range(len(chosen)), "o", color=f"C{i}", label=name, alpha=0.8)
    left.set(title="loss above the teacher, 8K tokens", xlabel="nats per token")
    left.set_yticks(range(len(chosen)), [label(row) for row in chosen], fontsize=6)
    right.set(title="needles found at 8K tokens", xlabel="share")
    right.set_yticks([])
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.invert_yaxis()
        axis.grid(alpha=0.25)
    _save(figure, png)


def draw_frontier(table: Sequence[Row], png: Path) -> None:
    """Loss above the teacher and needles of all kinds, against bytes of cache and state at 8K tokens."""
    chosen = whole_models(table)
    places = sorted({row.softmax_layers for row in chosen})
    figure, (left, right) = _figure((11, 4.2))
    for row in chosen:
        sse = "SSE" in row.other_layers
        style = {"color": f"C{places.index(row.softmax_layers)}", "marker": "o" if sse else "x", "ls": ""}
        left.plot((row.cache_bytes or 0) / 1e6, row.gap, **style)
        right.plot((row.cache_bytes or 0) / 1e6, row.found() / row.asked(), **style)
    teacher = (chosen[0].teacher_cache_bytes or 0) / 1e6
    for axis, name in ((left, "nats per token above the teacher"), (right, "needles found, all kinds")):
        axis.set(xlabel=f"MB of cache and state at 8K tokens (teacher: {teacher:.1f})", ylabel=name)
        axis.grid(alpha=0.25)
    for i, place in enumerate(places):
        right.plot([], [], "o", color=f"C{i}", label=f"softmax layers {place}")
    right.plot([], [], "o", color="grey", label="with SSE")
    right.plot([], [], "x", color="grey", label="windows or gated linear attention")
    right.legend(fontsize=7)
    _save(figure, png)


def draw_gains(speed: dict[str, Any], png: Path) -> None:
    """Memory and speed of a 0.6B shape by context.

    Args:
        speed: content of `hybrid_h200.json`.
        png: file to write.
    """
    figure, axes = _figure((9, 3.8))
    names = {"teacher": ("softmax attention", "softmax"), "hybrid-kv": ("hybrid, 4 of 5 layers SSE", "hybrid")}
    for axis, name, scale in ((axes[0], "cache_gib", 2**30 / 1e9), (axes[1], "tokens_per_s", 1.0)):
        for model, (text, style) in names.items():
            decoding = matching(speed, "decoding", shape="0.6b", model=model, batch=1)
            contexts = sorted({row["context"] for row in decoding})
            values = [
                best(matching({"decoding": decoding}, "decoding", context=context), name, most=name != "cache_gib")
                for context in contexts
            ]
            axis.plot(contexts, [scale * (v or 0) for v in values], "o-", color=STYLES[style], label=text)
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axis.set(xlabel="tokens of context", ylim=(0, None))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    axes[0].set(title="Memory: one sequence, Qwen3-0.6B shape", ylabel="GB of cache and state")
    axes[1].set(title="Speed: generation, Qwen3-0.6B shape", ylabel="tokens per second")
    figure.supxlabel("one NVIDIA H200", fontsize=8)
    _save(figure, png)


def _share(row: Row, kind: str) -> float:
    return row.found(kinds=[kind]) / row.asked([kind])


def _figure(size: tuple[float, float], **ratios: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 2, **ratios)


def _save(figure: Figure, png: Path) -> None:
    figure.savefig(png, dpi=110, metadata={"Software": None})


def main() -> None:
    table = rows.read(FOLDER / "results.csv")
    draw_runs(table, FOLDER / "runs.png")
    draw_frontier(table, FOLDER / "frontier.png")
    draw_gains(json.loads(SPEED.read_text(encoding="utf-8")), GAINS)


if __name__ == "__main__":
    main()
