"""Tables and a picture of the operator benchmark's JSON.

    python -m benchmarks.kernels.plot_operator benchmarks/kernels/operator_h200.json --png operator.png

Prints Markdown: the targets with their ratios, and with --all every figure. The picture is the paper's Figure
"ops_speed" with more candidates in it: forward on the left, forward and backward on the right.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kernels.operator_cases import CUDNN, FLASH, GLA, LOOP, MASK, OURS, VARLEN
from benchmarks.kernels.operator_targets import Row, Verdict, verdicts

DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
CURVES: tuple[tuple[str, int, str, str, str], ...] = (
    (OURS, 4, "eager", "#d55e00", "-"), (OURS, 64, "eager", "#d55e00", "--"), (OURS, 4, "graph", "#d55e00", ":"),
    (VARLEN, 4, "eager", "#0072b2", "-"), (VARLEN, 64, "eager", "#0072b2", "--"), (MASK, 4, "eager", "#009e73", "-"),
    (LOOP, 4, "eager", "#cc79a7", "-"), (GLA, 4, "eager", "#999999", "-"), (FLASH, 4, "eager", "#444444", "-"),
    (CUDNN, 4, "eager", "#444444", "--"),
)  # fmt: skip
"""candidate, N, mode, colour, dashes"""
NAMES = {OURS: "ours", VARLEN: "published varlen", MASK: "published mask", LOOP: "published loop",
         GLA: "chunk_gla (no partitions)", FLASH: "flash attention", CUDNN: "cuDNN attention"}  # fmt: skip


def markdown(report: Row, *, everything: bool) -> str:
    """The conditions of each run and the tables."""
    lines = [
        *(f"{env['device']}, torch {env['torch']}, triton {env['triton']}, ptxas {env['ptxas']}, fla-core "
          f"{env['fla_core']}, copy {env['copy_tb_per_s']} TB/s, commit {env['commit']}, {env['date']}; "
          f"`{env['command']}`"
          for env in (*report.get("earlier", []), report["environment"])), "",
        *_table(("target", "case", "direction", "measured", "allowed", ""), map(_verdict, verdicts(report["cells"]))),
    ]  # fmt: skip
    if everything:
        lines += ["", *_table(("group", "tokens", "N", "K", "case", "candidate", "direction", "eager ms", "graph ms",
                               "of the floor", "extra MiB", "syncs", "launches", "worst error"),
                              _figures(report["cells"]))]  # fmt: skip
    return "\n".join(lines)


def _verdict(v: Verdict) -> tuple[str, ...]:
    state = "not measured" if v.ratio is None else "met" if v.met else "missed"
    measured = "" if v.ratio is None else f"{v.ratio:.2g}{v.unit}"
    sign = "≥" if v.at_least else "≤"
    return v.target, v.case, v.direction, measured, f"{sign} {v.limit:g}{v.unit}", state


def _figures(cells: list[Row]) -> Iterator[tuple[Any, ...]]:
    for cell in cells:
        case = ", ".join(filter(None, (cell["note"], f"{cell['sequences']} sequences",
                                       f"{cell['busiest']:.0%} to one" if cell["busiest"] else "")))  # fmt: skip
        start = cell["group"], tokens(cell["tokens"]), cell["partitions"], cell["top_k"], case, cell["candidate"]
        if "error" in cell:
            yield *start, cell["error"], *[""] * 7
        for direction, name in DIRECTIONS.items():
            if (found := cell.get(direction)) is not None:
                graph = found["graph"]["ms"] if isinstance(found["graph"], dict) else None
                best = min(filter(None, (found["eager"]["ms"], graph)))
                share = f"{found['floor_ms'] / best:.0%}" if "floor_ms" in found else ""
                worst = max((cell["errors"] or {"": None}).values())
                yield (*start, name, _ms(found["eager"]["ms"]), "" if graph is None else _ms(graph), share,
                       f"{found['extra_mib']:,.0f}", found["syncs"], found.get("launches", ""),
                       "" if worst is None else f"{worst:.1e}")  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def tokens(count: int) -> str:
    """Tokens in short."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def _table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> list[str]:
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def curve(cells: list[Row], direction: str, candidate: str, partitions: int, mode: str) -> list[tuple[int, float]]:
    """(tokens, milliseconds) of a candidate in the group figure with K = 1, by tokens."""
    points = [
        (cell["tokens"], cell[direction][mode]["ms"]) for cell in cells
        if (cell["group"], cell["candidate"], cell["partitions"], cell["top_k"]) == ("figure", candidate, partitions, 1)
        and direction in cell and isinstance(cell[direction][mode], dict)
    ]  # fmt: skip
    return sorted(points)


def draw(report: Row, path: Path) -> None:
    """Time by tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (direction, title) in zip(figure.subplots(1, 2), DIRECTIONS.items(), strict=True):
        for candidate, partitions, mode, colour, dashes in CURVES:
            if points := curve(report["cells"], direction, candidate, partitions, mode):
                sse = f", N = {partitions}" if candidate in (OURS, VARLEN, MASK, LOOP) else ""
                label = NAMES[candidate] + sse + (", CUDA graph" if mode == "graph" else "")
                axis.plot(
                    *zip(*points, strict=True), color=colour, linestyle=dashes, marker="o", markersize=3, label=label
                )
        axis.set(title=title, xlabel="tokens (two sequences)", ylabel="ms")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda count, _: tokens(round(count)))
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    env = report["environment"]
    figure.supxlabel(f"8 heads x 128, K = 1, bfloat16, {env['device']}, torch {env['torch']}, commit {env['commit']}",
                     fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables; draw the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON that benchmarks.kernels.sse_operator wrote")
    parser.add_argument("--png", type=Path, help="picture to write")
    parser.add_argument("--all", action="store_true", help="print every figure too")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    print(markdown(report, everything=options.all))
    if options.png is not None:
        draw(report, options.png)


if __name__ == "__main__":
    main()
