"""Tables and a picture of the end-to-end benchmark's JSON.

    python -m benchmarks.kernels.plot_hybrid benchmarks/kernels/hybrid_h200.json --png hybrid_h200.png

Prints Markdown: the runs, the targets with their ratios, then every figure with its commit. Ratios are the hybrid's
over the teacher's, each in its best variant: the faster attention kernel, compiled or not.
"""

import argparse
import dataclasses as dc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TEACHER = "teacher"
COLOURS = {TEACHER: "#444444", "hybrid-kv": "#0072b2", "hybrid-query": "#d55e00"}


@dc.dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio that the hybrid should reach."""

    what: str
    section: str
    context: int
    figure: str
    limit: float
    least: bool
    """whether the ratio must be at least the limit, or at most"""

    def met(self, ratio: float) -> bool:
        """Whether a ratio reaches it."""
        return ratio >= self.limit if self.least else ratio <= self.limit


TARGETS = (
    Target(what="training tokens/s at 32k", section="training", context=2**15, figure="tokens_per_s", limit=2.0,
           least=True),
    Target(what="decode tokens/s at 128k", section="decoding", context=2**17, figure="tokens_per_s", limit=3.0,
           least=True),
    Target(what="decode memory at 128k", section="decoding", context=2**17, figure="peak_gib", limit=0.35,
           least=False),
)  # fmt: skip


def best(rows: list[Row], figure: str, *, most: bool) -> float | None:
    """The best value of a figure among rows that have it."""
    values = [row[figure] for row in rows if figure in row]
    return None if not values else max(values) if most else min(values)


def matching(report: Row, section: str, **wanted: Any) -> list[Row]:
    """Rows of a section with the given entries."""
    return [row for row in report.get(section, []) if all(row[key] == value for key, value in wanted.items())]


def distinct(rows: list[Row], key: str) -> list[Any]:
    """The values of an entry, in the order in which they first appear."""
    return list(dict.fromkeys(row[key] for row in rows))


def verdicts(report: Row) -> Iterator[tuple[str, str, int, Target, float]]:
    """(shape, hybrid, batch, target, ratio) of every target that the report can answer."""
    for target in TARGETS:
        rows = matching(report, target.section, context=target.context)
        for shape in distinct(rows, "shape"):
            for batch in distinct(matching(report, target.section, context=target.context, shape=shape), "batch"):
                same = {"context": target.context, "shape": shape, "batch": batch}
                values = {name: best(matching(report, target.section, model=name, **same), target.figure,
                                     most=target.least) for name in COLOURS}  # fmt: skip
                teacher = values.pop(TEACHER)
                for name, value in values.items():
                    if value is not None and teacher is not None:
                        yield shape, name, batch, target, value / teacher


def markdown(report: Row) -> str:
    """All tables."""
    lines = [
        *(f"{env['device']}, torch {env['torch']}, triton {env['triton']}, transformers {env['transformers']}, "
          f"commit {env['commit']}, {env['date']}; `{env['command']}`"
          for env in (*report.get("earlier", []), report["environment"])), "",
        *_table(("target", "shape", "hybrid", "batch", "ratio", ""), (
            (f"{t.what} {'≥' if t.least else '≤'} {t.limit:g}x", shape, name, batch, f"{ratio:.2f}x",
             "met" if t.met(ratio) else "missed")
            for shape, name, batch, t, ratio in verdicts(report))), "",
        *_table(("shape", "model", "context", "batch", "attention", "compiled", "commit", "tokens/s", "peak GiB"), (
            (*_start(r), r["attention"], _yes(r["compiled"]), _commit(report, r),
             *_figures(r, "tokens_per_s", "peak_gib"))
            for r in report.get("training", []))), "",
        *_table(("shape", "model", "context", "attention", "commit", "prefill tokens/s", "peak GiB"), (
            (r["shape"], r["model"], _tokens(r["context"]), r["attention"], _commit(report, r),
             *_figures(r, "prefill_tokens_per_s", "prefill_peak_gib")) for r in report.get("prefill", []))), "",
        *_table(("shape", "model", "context", "batch", "attention", "compiled", "commit", "ms per step", "tokens/s",
                 "peak GiB", "cache GiB", "weights + cache, GiB/s"), (
            (*_start(r), r["attention"], _yes(r["compiled"]), _commit(report, r),
             *_figures(r, "step_ms", "tokens_per_s", "peak_gib", "cache_gib"),
             _number(1e3 * r["least_read_gib"] / r["step_ms"]) if "step_ms" in r else "")
            for r in report.get("decoding", []))), "",
        *_table(("profile of", "shape", "model", "context", "compiled", "commit", "kernels", "ms in them"), (
            (r["work"], r["shape"], r["model"], _tokens(r["context"]), _yes(r["compiled"]), _commit(report, r),
             *_figures(r, "launches", "gpu_ms"))
            for r in report.get("profiles", []))),
    ]  # fmt: skip
    return "\n".join(lines)


def _start(row: Row) -> tuple[str, str, str, int]:
    return row["shape"], row["model"], _tokens(row["context"]), row["batch"]


def _commit(report: Row, row: Row) -> str:
    return str(row.get("commit", report["environment"]["commit"]))


def _figures(row: Row, *names: str) -> list[str]:
    if "error" in row:
        return [row["error"], *[""] * (len(names) - 1)]
    return [_number(row[name]) if name in row else "" for name in names]


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tokens(context: int) -> str:
    return f"{context // 1024}k" if context >= 1024 else str(context)


def _table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> list[str]:
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def draw(report: Row, shape: str, path: Path) -> None:
    """Tokens/s of training and decoding and the memory of decoding, by context, of one sequence (or step)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels: tuple[tuple[str, str, str, bool, Callable[[Row], bool]], ...] = (
        ("training, tokens/s", "training", "tokens_per_s", True, lambda row: not row["compiled"]),
        ("decoding one row, tokens/s", "decoding", "tokens_per_s", True, _one_row),
        ("decoding one row, peak GiB", "decoding", "peak_gib", False, _one_row),
    )
    for axis, (title, section, name, most, wanted) in zip(figure.subplots(1, 3), panels, strict=True):
        for model, colour in COLOURS.items():
            rows = [row for row in matching(report, section, shape=shape, model=model) if wanted(row)]
            points = [(c, best([r for r in rows if r["context"] == c], name, most=most))
                      for c in distinct(rows, "context")]  # fmt: skip
            found = [(c, value) for c, value in points if value is not None]
            if found:
                axis.plot(*zip(*found, strict=True), color=colour, marker="o", markersize=4, label=model)
        axis.set(title=title, xlabel="tokens of context", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda context, _: _tokens(int(context)))
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    env = report["environment"]
    figure.supxlabel(f"{shape}, {env['device']}, torch {env['torch']}, commit {env['commit']}", fontsize=8)
    figure.savefig(path, dpi=120)


def _one_row(row: Row) -> bool:
    return bool(row["batch"] == 1 and not row["compiled"])


def main(arguments: list[str] | None = None) -> None:
    """Print the tables; draw the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON that benchmarks.kernels.hybrid wrote")
    parser.add_argument("--png", type=Path, help="picture to write")
    parser.add_argument("--shape", default="0.6b", help="which the picture shows")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    print(markdown(report))
    if options.png is not None:
        draw(report, options.shape, options.png)


if __name__ == "__main__":
    main()
