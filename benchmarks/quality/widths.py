"""Is the rule for rates right? Half, once and twice what it gives, at three widths; and half and twice its step at one.

    python demo/teacher_data.py --books out/classic-books --data out/demo-data                     # a CPU core, 200 s
    python demo/train_teacher.py --data out/demo-data --out out/teacher-1024 --width 1024 --seconds 75       # one GPU
    python -m benchmarks.quality.widths demo/teacher ../shared/checkpoints/teacher-qwen3-32m out/teacher-1024 \\
        --batches ../shared/checkpoints/teacher-qwen3-32m --graphs --out out/widths.json                     # one GPU

Each teacher is converted once as `sse-convert recipes new` would (layers chosen, windows, calibration), then trained
from there with the first stage of the measured recipe, on fewer tokens. What counts is KL on held-out books. A file
that exists keeps what it has of other teachers.
"""

import argparse
import dataclasses as dc
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.quality.convert import commit
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.evaluation.intervals import Z95
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, recipe_from_dict
from sse_convert.recipe.recommended import MIXER, measured, recommended_layers, recommended_mixer, scaled_rates
from sse_convert.report import table

FACTORS = (0.5, 1.0, 2.0)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training."""

    teacher: str
    width: int
    rate: float
    """times the rule's rates"""
    step: float
    """times the measured step's tokens"""

    @property
    def name(self) -> str:
        """Its folder."""
        return f"rate-{self.rate:g}_step-{self.step:g}"


def recipe_of(trial: Trial, work: Path, options: argparse.Namespace) -> Recipe:
    """The recipe of a trial."""
    own = measured()
    stage = own.stages[0]
    rates = {group: trial.rate * rate for group, rate in scaled_rates(stage, trial.width).items()}
    layers = json.loads((Path(trial.teacher) / "config.json").read_text())["num_hidden_layers"]
    data = {
        "recipe_version": 1,
        "model": trial.teacher,
        "layers": recommended_layers([True] * layers),
        "mixers": {MIXER: recommended_mixer()},
        "calibrate": {"rows": own.calibrate.rows, "seq_len": options.length},
        "stages": [
            {
                "name": "distill",
                "loss": "kl",
                "tokens": options.tokens,
                "seq_len": options.length,
                "train": stage.train,
                "lr": rates,
                "batch_tokens": int(trial.step * stage.batch_tokens),
                "warmup": stage.warmup,
                "min_lr": stage.min_lr,
            }
        ],
        "train": {"compile": False, "cuda_graphs": options.graphs},
        "data": {
            "train": [{"path": str(options.books / "train")}],
            "valid": [{"path": str(options.books / "valid")}],
        },
        "eval": {"lengths": [options.length], "tokens": 65536},
        "export": {"dir": str(work / "exported")},
    }
    return recipe_from_dict(data, trial.name)


def run(trials: list[Trial], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Convert a teacher once, and train every trial of it."""
    found = []
    work = options.work / Path(trials[0].teacher).name
    for trial in trials:
        recipe = recipe_of(trial, work, options)
        if not (work / "calibrated").exists():
            say("\n".join(api.convert(recipe, work / "converted").lines()))
            api.calibrate(recipe, work / "converted", work / "calibrated")
        start = time.monotonic()
        api.distill(recipe, work / "calibrated", work / trial.name)
        seconds = time.monotonic() - start
        report = api.evaluate(recipe, work / trial.name).to_dict()
        found.append({**dc.asdict(trial), "tokens": options.tokens, "seconds": round(seconds, 1), "report": report})
    return found


def trials_of(teacher: str, *, batches: bool) -> list[Trial]:
    """All of a teacher's."""
    width = json.loads((Path(teacher) / "config.json").read_text())["hidden_size"]
    rates = [Trial(teacher=teacher, width=width, rate=factor, step=1.0) for factor in FACTORS]
    steps = [Trial(teacher=teacher, width=width, rate=1.0, step=factor) for factor in (0.5, 2.0)]
    return [*rates, *(steps if batches else [])]


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The result for a person: KL to the teacher and loss above it, nats per token, with the halves of their 95%
    intervals."""
    head = ("width", "rates, times the rule's", "step, times the measured", "KL", "+-", "gap", "+-", "seconds")
    return table(head, [(r["width"], r["rate"], r["step"], *figures(r["report"]), r["seconds"]) for r in found])


def figures(report: dict[str, Any]) -> tuple[float, float, float, float]:
    """KL, half its interval, gap, half its interval.

    Args:
        report: `EvalReport.to_dict()`.
    """
    (agreement,), (gap,) = report["student"]["agreement"], report["loss_gaps"]
    return agreement["kl"], agreement["kl_high"] - agreement["kl"], gap["gap"], Z95 * gap["gap_se"]


@reporting_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teachers", nargs="+", help="folders, of models of different widths")
    parser.add_argument("--batches", default="", help="the one of them whose steps are varied as well")
    parser.add_argument("--books", type=Path, default=Path("out/classic-books"))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of each training")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs: one GPU")
    parser.add_argument("--work", type=Path, default=Path("out/widths"), help="folder to make")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    hush_libraries()
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    found = [trial for trial in earlier.get("trials", []) if trial["teacher"] not in options.teachers]
    command = shlex.join(["python", "-m", "benchmarks.quality.widths", *sys.argv[1:]])
    for teacher in options.teachers:
        found += run(trials_of(teacher, batches=teacher == options.batches), options)
        conditions = found[0]["report"]["conditions"]
        write_json(
            options.out,
            {
                "schema": 1,
                "commands": [*earlier.get("commands", []), command],
                "commit": commit(),
                "date": time.strftime("%Y-%m-%d"),
                "hardware": conditions["device"],
                "trials": found,
            },
        )
    say("\n".join(lines(found)))


if __name__ == "__main__":
    sys.exit(main())
