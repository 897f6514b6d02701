"""Levers of distillation, one at a time: how close the student comes, and what it finds.

    python -m benchmarks.quality.levers --set stages.0.tokens=5M --set stages.1.tokens=4M --out out/levers.json
    python -m benchmarks.quality.levers --levers "longer rows earlier" --seeds 2 --out out/levers.json

Each lever of `LEVERS` changes one thing about a recipe whose two stages have loss kl; levers are compared by seed, and
those that change the last stage alone go on from one first stage. The JSON is rewritten after each training. Started
again it goes on, and a training that was cut off does so from its checkpoint in --work. --minutes begins no training
that would take longer. COMMIT names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.quality.lever_patches import last_weights_averaged, late_positions_count_more, unchanged
from benchmarks.quality.resumed_report import resumed_report
from benchmarks.quality.swapped_layers import Clock
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.schema import LearningRates, Stage
from sse_convert.training.stage import run_stage


class Patch(Protocol):
    """Changes how a stage is trained."""

    def __call__(self, stage: Stage) -> AbstractContextManager[None]:
        """Inside, the stage is trained otherwise."""


@dc.dataclass(frozen=True, slots=True)
class Lever:
    """One change."""

    changes: tuple[str, ...] = ()
    """of the recipe"""
    first: float | None = None
    """share of the tokens that the first stage, of short rows, has; None for the recipe's"""
    rates: float = 1.0
    """times the recipe's"""
    patch: Patch = unchanged
    """of both stages"""
    later: tuple[str, ...] = ()
    """changes of the recipe for the last stage alone"""
    later_patch: Patch = unchanged
    """of the last stage alone"""

    @property
    def start(self) -> "Lever":
        """What makes the first stage, which levers that only change the last one share."""
        return dc.replace(self, later=(), later_patch=unchanged)


FEW = ("mixers.sse+sliding.num_partitions=16",)
"""a quarter of the recipe's states"""
LEVERS = {
    "as it is": Lever(),
    "longer rows earlier": Lever(first=0.3),
    "long rows late": Lever(first=0.85),
    "late positions count more": Lever(patch=late_positions_count_more),
    "last weights averaged": Lever(later_patch=last_weights_averaged),
    "fewer needles at the end": Lever(later=("data.needles.share=0.3",)),
    "16 partitions": Lever(FEW),
    "16 partitions, half the rates": Lever(FEW, rates=0.5),
    "16 partitions, twice the rates": Lever(FEW, rates=2.0),
}


@dc.dataclass(frozen=True, slots=True)
class Trial:
    """A lever and a seed, with the recipes of the first stage and of the last one."""

    lever: str
    seed: int
    first: Recipe
    last: Recipe

    @property
    def key(self) -> tuple[str, int]:
        """What tells trials apart."""
        return self.lever, self.seed

    def measure(self, work: Path) -> dict[str, Any]:
        """Train and evaluate; folders that are there are taken as they are."""
        start = time.monotonic()
        student = api.evaluate(self.last, self._trained(work)).to_dict()["student"]
        return {
            "lever": self.lever,
            "seed": self.seed,
            "tokens": [stage.tokens for stage in self.first.stages],
            "kl": {part["length"]: part["kl"] for part in student["agreement"] if "kl" in part},
            "loss": {part["length"]: part["loss"] for part in student["held_out"]},
            "needles": student["needles"],
            "seconds": round(time.monotonic() - start, 1),
        }

    def _trained(self, work: Path) -> Path:
        lever, first, last = LEVERS[self.lever], self.first.stages[0], self.last.stages[-1]
        begun = next((name for name, own in LEVERS.items() if own == lever.start), self.lever)
        middle, end = (work / f"{name}-{self.seed}".replace(",", "").replace(" ", "-") for name in (begun, self.lever))
        with lever.patch(first):
            run_stage(self.first, first, self._converted(middle), middle / "first")
        end.mkdir(exist_ok=True)
        with lever.patch(last), lever.later_patch(last):
            run_stage(self.last, last, middle / "first", end / "last")
        return end / "last"

    def _converted(self, folder: Path) -> Path:
        """The student before training."""
        if not (made := folder / "converted").exists():
            api.convert(self.first, out=made)
        if not self.first.calibrate.enabled:
            return made
        if not (calibrated := folder / "calibrated").exists():
            api.calibrate(self.first, made, out=calibrated)
        return calibrated


def trial(options: argparse.Namespace, name: str, seed: int) -> Trial:
    """A lever and a seed.

    Raises:
        RecipeError: the recipe is malformed.
        UsageError: its stages are not two of loss kl.
    """
    lever = LEVERS[name]
    changes = [*options.set, *lever.changes, f"train.seed={seed}"]
    recipes = [_with(load_recipe(options.recipe, own), lever) for own in (changes, [*changes, *lever.later])]
    return Trial(name, seed, *recipes)


def _with(recipe: Recipe, lever: Lever) -> Recipe:
    """The recipe with a lever's rates and share of the first stage."""
    losses = [stage.loss for stage in recipe.stages]
    if losses != ["kl", "kl"]:
        raise UsageError(f"stages of loss {', '.join(losses)}", expected="two of loss kl", fix="give another --recipe")
    first, second = (dc.replace(stage, lr=_scaled(stage.lr, lever.rates)) for stage in recipe.stages)
    if lever.first is not None:
        total = first.tokens + second.tokens
        first = dc.replace(first, tokens=round(lever.first * total))
        second = dc.replace(second, tokens=total - first.tokens)
    return dc.replace(recipe, stages=[first, second])


def _scaled(rates: float | LearningRates, by: float) -> float | LearningRates:
    if isinstance(rates, float | int):
        return by * rates
    own = {name: value for name in ("mixers", "new", "rest") if (value := getattr(rates, name)) is not None}
    return dc.replace(rates, **{name: by * value for name, value in own.items()})


def run(options: argparse.Namespace) -> None:
    """Measure what the report lacks.

    Args:
        options: the command line.
    """
    trials = [trial(options, name, seed) for seed in range(options.seeds) for name in options.levers]
    report = resumed_report(options.out, {"recipe": options.recipe, "overrides": options.set}, "trials")
    done, clock = {(entry["lever"], entry["seed"]) for entry in report["trials"]}, Clock(options.minutes)
    for one in trials:
        if one.key in done or not clock.may_start():
            continue
        entry = one.measure(options.work)
        clock.took(entry["seconds"])
        report["trials"].append(entry)
        write_json(options.out, report)
        closeness = ", ".join(f"{kl:.4f} at {length:,}" for length, kl in entry["kl"].items())
        say(f"{one.lever}, seed {one.seed}: KL {closeness}; {entry['seconds']:.0f} s")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS), metavar="NAME", help=", ".join(LEVERS))
    p.add_argument("--recipe", default="recipes/teacher-qwen3-32m-pure.yaml", help="two stages of loss kl")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--seeds", type=int, default=1, help="seeds of each lever")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write, and to go on with")
    p.add_argument("--work", type=Path, default=Path("out/levers"), help="folder of trainings")
    p.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would take longer")
    return p


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
