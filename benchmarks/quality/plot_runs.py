"""Needles found and loss above the teacher, one line per run of `convert.py`; and both against the cache's size.

    python -m benchmarks.quality.plot_runs benchmarks/quality/runs/keep-*.json --png benchmarks/quality/runs.png \\
        --frontier benchmarks/quality/frontier.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from sse_convert.files import replacing

COLOURS = ("tab:blue", "tab:orange", "tab:green")
"""by length, shortest first"""
MARKERS = {True: "o", False: "x"}
"""by whether SSE has a part"""


def kept(run: dict[str, Any]) -> str:
    """The layers that are softmax attention still."""
    return " ".join(str(i) for i, mixer in enumerate(run["layers"]) if mixer == "full") or "none"


def draw(by_name: dict[str, dict[str, Any]], png: Path) -> None:
    """One panel per needle setting and one of loss gaps, with 95% intervals; a line per run, by gap.

    Args:
        by_name: what `convert.py` writes, all evaluated on needles of the same kinds.
        png: file to write.
    """
    plt = _pyplot()
    names = sorted(by_name, key=lambda name: by_name[name]["after"]["loss_gaps"][-1]["gap"])
    runs = [by_name[name] for name in names]
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
    axes[0].set_yticks(range(len(runs)), names)
    axes[0].invert_yaxis()
    handles = [plt.Line2D([], [], marker="o", ls="", color=colours[n], label=f"{n:,} tokens") for n in lengths]
    axes[-1].legend(handles=handles, fontsize=7)
    _save(figure, png)


def draw_frontier(runs: list[dict[str, Any]], png: Path) -> None:
    """Loss above the teacher and needles found at the longest length, against bytes of cache and state there.

    Args:
        runs: those of `draw`.
        png: file to write.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    places = sorted({kept(run) for run in runs})
    for run in runs:
        length = run["after"]["loss_gaps"][-1]["length"]
        (size,) = (row["student_bytes"] for row in run["after"]["cache"] if row["length"] == length)
        needles = [n for n in _needles(run) if n["length"] == length]
        found = sum(n["correct"] for n in needles) / sum(n["samples"] for n in needles)
        style = {"color": f"C{places.index(kept(run))}", "marker": MARKERS["sse" in " ".join(run["layers"])]}
        left.plot(size / 1e6, run["after"]["loss_gaps"][-1]["gap"], ls="", **style)
        right.plot(size / 1e6, found, ls="", **style)
    left.set(xlabel=f"MB of cache and state at {length:,} tokens", ylabel="nats per token above the teacher")
    right.set(xlabel=f"MB of cache and state at {length:,} tokens", ylabel="needles found, all settings")
    handles = [plt.Line2D([], [], marker="o", ls="", color=f"C{i}", label=f"softmax {p}") for i, p in enumerate(places)]
    handles += [plt.Line2D([], [], marker=MARKERS[sse], ls="", color="grey", label=name)
                for sse, name in ((True, "with SSE"), (False, "window or GLA"))]  # fmt: skip
    right.legend(handles=handles, fontsize=7)
    _save(figure, png)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, png: Path) -> None:
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    _pyplot().close(figure)


def _needles(run: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run["after"]["student"]["needles"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--png", type=Path, required=True, help="file to write")
    parser.add_argument("--frontier", type=Path, metavar="PNG", help="file to write of quality against cache size")
    options = parser.parse_args()
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in options.runs}
    draw(runs, options.png)
    if options.frontier:
        draw_frontier(list(runs.values()), options.frontier)


if __name__ == "__main__":
    main()
