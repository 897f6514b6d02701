"""The paper's comparisons on converted layers: the variants of a claim, trained alike, and whether they bear it out.

    python -m benchmarks.paper.layer states --out benchmarks/paper         # one GPU, minutes: states.json, states.png
    python -m benchmarks.paper.layer gates keys_paper parameters_16 conversion hybrid --jobs 4 --minutes 9 --resume \\
        --out out/decide                                      # what two seeds left open; the same command goes on
    python -m benchmarks.paper.layer states --tiny --seeds 1 --out out     # a CPU: shows that it runs

Each variant takes the place of layer 7 in the frozen 32M teacher (`hybrid`: of eight layers at once) and is trained and
scored as in `benchmarks.quality.swapped_layers`, whose options these are: on the rows of --short (5.8M tokens, 64
needles of each kind, questions early in the rows), with eight seeds (`hybrid`: three). Comparisons of the same layers
share the teacher's run and the variants that stand in more than one of them. The claims and their variants are in
`comparisons.py`. Judged are the needles found, of all kinds together, the loss of their answers (mean of the kinds) and
the loss of text above the teacher's, at each length; see `verdicts.py`. A seed counts once all variants have it. COMMIT
names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import sys
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.paper.comparisons import COMPARISONS, Comparison
from benchmarks.paper.verdicts import Difference, combine, judge, loss_difference, mean, share_difference
from benchmarks.quality import swapped_layers
from benchmarks.quality.swapped_plot import draw
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json
from sse_convert.report import table

EARLY = "data.needles.early=0.7"


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Something that variants are judged by."""

    kind: str
    """needles, answers or loss"""
    length: int
    """tokens per row"""
    figures: dict[str, list[float]]
    """by variant, one per seed: share of needles found; loss of their answers, or loss above the teacher's, in nats per
    token"""
    samples: int = 0
    """needles asked for"""

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.kind}_{self.length}"

    def without(self, names: Collection[str]) -> "Measure":
        """The same without some variants, so that they do not count towards the spread of seeds."""
        return dc.replace(self, figures={name: own for name, own in self.figures.items() if name not in names})

    def difference(self, better: str, worse: str) -> Difference:
        """How much better the first is."""
        if self.kind == "needles":
            return share_difference(self.figures, self.samples, better, worse)
        return loss_difference(self.figures, better, worse)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="+", choices=sorted(COMPARISONS), metavar="NAME", help=", ".join(sorted(COMPARISONS)))
    p.add_argument("--out", type=Path, required=True, help="folder for NAME.json and NAME.png")
    swapped_layers.add_settings(p)
    p.set_defaults(short=True, seeds=8, set=[EARLY], layers=None)
    return p


def measures(entries: list[dict[str, Any]]) -> list[Measure]:
    """Needles, losses of their answers and of text at each length, of the seeds that all variants have."""
    runs = _runs(entries)
    first = entries[0]
    of = {"needles": _found, "answers": _answer_loss, "loss": _gap}
    if any("answer_loss" not in asked for own in runs.values() for entry in own for asked in entry["needles"]):
        del of["answers"]  # reports from before it was measured
    found = []
    for length in [text["length"] for text in first["text"]]:
        samples = sum(n["samples"] for n in first["needles"] if n["length"] == length)
        for kind, figure in of.items():
            by_seed = {name: [figure(entry, length) for entry in own] for name, own in runs.items()}
            found.append(Measure(kind=kind, length=length, figures=by_seed, samples=samples))
    return found


def verdicts(comparison: Comparison, found: list[Measure]) -> dict[str, Any]:
    """Outcomes by kind of measure over all lengths, and of each measure with its differences."""
    rows = []
    for measure in (m.without(comparison.beside) for m in found):
        ahead, not_behind = (
            [measure.difference(*pair) for pair in pairs] for pairs in (comparison.ahead, comparison.not_behind)
        )
        rows.append(
            {
                "measure": measure.kind,
                "length": measure.length,
                "outcome": judge(ahead, not_behind),
                "ahead": [dc.asdict(difference) for difference in ahead],
                "not_behind": [dc.asdict(difference) for difference in not_behind],
            }
        )
    kinds = dict.fromkeys(measure.kind for measure in found)
    return {
        **{kind: combine(row["outcome"] for row in rows if row["measure"] == kind) for kind in kinds},
        "measures": rows,
    }


def figures(entries: list[dict[str, Any]], found: list[Measure]) -> dict[str, dict[str, float]]:
    """Means over the seeds that count, by variant, with the bytes of its state; and the needles of the teacher."""
    teacher = {m.name: _found(entries[0], m.length, "teacher") for m in found if m.kind == "needles"}
    own = {
        entry["name"]: {
            **{m.name: mean(m.figures[entry["name"]]) for m in found if m.figures},
            "state_bytes": state_bytes(entry["cache"]),
        }
        for entry in entries
    }
    return {"teacher": teacher, **own}


def state_bytes(cache: list[dict[str, int]]) -> int:
    """Bytes of a sequence's states: what the cache has apart from what grows with the length.

    Args:
        cache: bytes at two lengths at least, as `plan` gives them.
    """
    short, long = cache[:2]
    per_token = (long["hybrid_bytes"] - short["hybrid_bytes"]) / (long["length"] - short["length"])
    return round(short["hybrid_bytes"] - per_token * short["length"])


def _runs(entries: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Entries by variant, of the seeds that all variants have; nothing where there is none."""
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    by_run = {(entry["name"], entry["seed"]): entry for entry in entries}
    seeds = [seed for seed in sorted({seed for _, seed in by_run}) if all((name, seed) in by_run for name in names)]
    return {name: [by_run[name, seed] for seed in seeds] for name in names} if seeds else {}


def _found(entry: dict[str, Any], length: int, key: str = "accuracy") -> float:
    asked = [needles for needles in entry["needles"] if needles["length"] == length]
    return sum(n[key] * n["samples"] for n in asked) / sum(n["samples"] for n in asked)


def _answer_loss(entry: dict[str, Any], length: int) -> float:
    asked = [needles for needles in entry["needles"] if needles["length"] == length]
    return mean([n["answer_loss"] for n in asked])


def _gap(entry: dict[str, Any], length: int) -> float:
    gap: float = next(text["gap"] for text in entry["text"] if text["length"] == length)
    return gap


def _lines(report: dict[str, Any]) -> list[str]:
    """The verdicts with their differences, for a person."""
    found = report["verdicts"]
    outcomes = ", ".join(f"{kind} {outcome}" for kind, outcome in found.items() if kind != "measures")
    lines = [f"{report['claim']}: {outcomes} ({report['source']})"]
    for row in found["measures"]:
        unit = 100 if row["measure"] == "needles" else 1
        differences = "; ".join(_difference(d, unit) for d in (*row["ahead"], *row["not_behind"]))
        lines.append(f"    {row['measure']} at {row['length']:,}: {row['outcome']} ({differences})")
    return lines


def _difference(found: dict[str, Any], unit: int) -> str:
    if found["by"] is None:
        return f"{found['better']} or {found['worse']} not measured"
    digits = 1 if unit == 100 else 3
    doubt = "unknown, one seed" if found["doubt"] is None else f"{unit * found['doubt']:.{digits}f}"
    return f"{found['better']} over {found['worse']} {unit * found['by']:+.{digits}f} ± {doubt}"


def compare(runner: swapped_layers.Runner, name: str, folder: Path) -> dict[str, Any] | None:
    """Run a comparison, judge it, and write and say what came out; its report, or None if nothing has been run yet.

    Raises:
        UsageError, RecipeError, DataError, CheckpointError: as of `Runner.run`.
    """
    comparison, out = COMPARISONS[name], folder / f"{name}.json"
    report = runner.run(name, comparison.variants, out)
    if not report["variants"]:
        return None
    found = measures(report["variants"])
    report |= {
        "claim": comparison.claim,
        "source": comparison.source,
        "differ_in": comparison.differ_in,
        "figures": figures(report["variants"], found),
        "verdicts": verdicts(comparison, found),
    }
    write_json(out, report)
    draw(report, out.with_suffix(".png"))
    say("\n".join(_lines(report)))
    return report


def compare_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The comparisons that are asked for, those of the same layers together; the reports there are."""
    clock, reports = swapped_layers.Clock(options.minutes), []
    settings = {name: _options(options, COMPARISONS[name]) for name in options.names}
    by_layers = sorted(options.names, key=lambda name: _order(settings[name]))
    for _, group in groupby(by_layers, lambda name: _order(settings[name])):
        names = list(group)
        with swapped_layers.Runner(settings[names[0]], clock) as runner:
            reports += [compare(runner, name, options.out) for name in names]
    return [report for report in reports if report is not None]


def _options(options: argparse.Namespace, comparison: Comparison) -> argparse.Namespace:
    """The options with a comparison's layers and seeds."""
    layers = options.layers or list(comparison.layers)
    return argparse.Namespace(**{**vars(options), "layers": layers, "seeds": min(options.seeds, comparison.most_seeds)})


def _order(options: argparse.Namespace) -> tuple[int, list[int]]:
    """Single layers first, which take less time."""
    return len(options.layers), options.layers


def summary(reports: list[dict[str, Any]]) -> list[str]:
    """A table of claims, the seeds that count and the outcomes."""
    rows = []
    for report in reports:
        by_variant = _runs(report["variants"])
        seeds = len(next(iter(by_variant.values()))) if by_variant else 0
        outcomes = [report["verdicts"].get(kind, "") for kind in ("needles", "answers", "loss")]
        rows.append((report["settings"]["set"], seeds, *outcomes))
    return table(("claim", "seeds", "needles", "answers", "text"), rows)


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    say("\n".join(summary(compare_all(options))))


if __name__ == "__main__":
    sys.exit(main())
