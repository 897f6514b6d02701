"""The README's figure: memory and speed of generation by context, softmax attention and a hybrid.

    python -m benchmarks.kernels.plot_gains

Writes `gains.png` beside the documentation's pages, from `hybrid_h200.json`.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.kernels.plot_hybrid import best, matching

ROOT = Path(__file__).parent.parent.parent
GAINS = ROOT / "docs" / "pages" / "assets" / "gains.png"
SPEED = ROOT / "benchmarks" / "kernels" / "hybrid_h200.json"
STYLES = {"softmax": "#444444", "hybrid": "#0072b2"}
"""colours"""


def draw_gains(speed: dict[str, Any], png: Path) -> None:
    """Memory and speed of a 0.6B shape by context.

    Args:
        speed: content of `hybrid_h200.json`.
        png: file to write.
    """
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
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
    figure.savefig(png, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw_gains(json.loads(SPEED.read_text(encoding="utf-8")), GAINS)
