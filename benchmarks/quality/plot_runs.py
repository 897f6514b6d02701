"""Needles found and loss above the teacher, one line per run of `convert.py`.

python -m benchmarks.quality.plot_runs benchmarks/quality/runs/*.json --png benchmarks/quality/runs.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from sse_convert.evaluation.files import replacing

COLOURS = ("tab:blue", "tab:orange", "tab:green")
"""by length, shortest first"""


def label(run: dict[str, Any]) -> str:
    """The kept layers, what the others became, and the training tokens."""
    layers: list[str] = run["layers"]
    kept = " ".join(str(i) for i, mixer in enumerate(layers) if mixer == "full") or "none"
    others = " ".join(sorted(set(layers) - {"full"}))
    return f"softmax {kept}; {others}; {run['training_tokens'] / 1e6:.0f}M"


def draw(runs: list[dict[str, Any]], png: Path) -> None:
    """One panel per needle setting and one of loss gaps, with 95% intervals.

    Args:
        runs: what `convert.py` writes, all evaluated on needles of the same kinds.
        png: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys((n["kind"], n["keys"]) for n in _needles(runs[0])))
    lengths = sorted({gap["length"] for run in runs for gap in run["after"]["loss_gaps"]})
    colours = dict(zip(lengths, COLOURS, strict=False))
    size = 3.2 * (len(kinds) + 1), 1.4 + 0.4 * len(runs)
    figure, axes = plt.subplots(1, len(kinds) + 1, figsize=size, sharey=True)
    for axis, (kind, keys) in zip(axes, kinds, strict=False):
        for row, run in enumerate(runs):
            for n in _needles(run):
                if (n["kind"], n["keys"]) == (kind, keys):
                    errors = [[n["accuracy"] - n["low"]], [n["high"] - n["accuracy"]]]
                    axis.errorbar(n["accuracy"], row, xerr=errors, fmt="o", capsize=2, color=colours[n["length"]])
        axis.set(title=f"{kind}, {keys} key{'s' if keys > 1 else ''}", xlabel="needles found", xlim=(-0.03, 1.03))
    for row, run in enumerate(runs):
        for gap in run["after"]["loss_gaps"]:
            error = 1.96 * gap["gap_se"]
            axes[-1].errorbar(gap["gap"], row, xerr=error, fmt="o", capsize=2, color=colours[gap["length"]])
    axes[-1].set(title="loss above the teacher", xlabel="nats per token")
    axes[0].set_yticks(range(len(runs)), [label(run) for run in runs])
    axes[0].invert_yaxis()
    handles = [plt.Line2D([], [], marker="o", ls="", color=colours[n], label=f"{n:,} tokens") for n in lengths]  # type: ignore[attr-defined]
    axes[-1].legend(handles=handles, fontsize=7)
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _needles(run: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run["after"]["student"]["needles"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--png", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in options.runs]
    draw(sorted(runs, key=lambda run: run["after"]["loss_gaps"][-1]["gap"]), options.png)


if __name__ == "__main__":
    main()
