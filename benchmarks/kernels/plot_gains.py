"""The README's figure: memory and speed of generation by context, softmax attention and a hybrid.

    python -m benchmarks.kernels.plot_gains

Writes `gains.png` beside the documentation's pages, from `hybrid_h200.json`.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.kernels.plot_hybrid import best, matching

ROOT = Path(__file__).parent.parent.parent
GAINS = ROOT / "docs" / "pages" / "assets" / "gains.png"
SPEED = ROOT / "benchmarks" / "kernels" / "hybrid_h200.json"
STYLES = {"softmax": "#444444", "hybrid": "#0072b2"}
"""colours"""


@rc_context({"font.size": 12})  # to be read on a phone, where the figure is 360 px wide
def draw_gains(speed: dict[str, Any], png: Path) -> None:
    """Memory and speed of a 0.6B shape by context.

    Args:
        speed: content of `hybrid_h200.json`.
        png: file to write.
    """
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
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
        axis.grid(alpha=0.25)
    axes[0].set(title="Memory, one sequence", ylabel="GB of cache and state")
    axes[1].set(title="Speed of generation", ylabel="tokens per second")
    figure.suptitle("Qwen3-0.6B shape, one NVIDIA H200")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(png, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    draw_gains(json.loads(SPEED.read_text(encoding="utf-8")), GAINS)
