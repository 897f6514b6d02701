"""Levers of distillation, one at a time: how close the student comes, and what it finds.

    python -m benchmarks.quality.levers --set stages.0.tokens=5M --set stages.1.tokens=4M --out out/levers.json
    python -m benchmarks.quality.levers --levers "longer rows earlier" --seeds 2 --out out/levers.json

Each lever of `LEVERS` changes one thing about a recipe whose two stages have loss kl; levers are compared by seed. The
JSON is rewritten after each training. Started again it goes on, and a training that was cut off does so from its
checkpoint in --work. --minutes begins no training that would take longer. COMMIT names the commit where the checkout
has no git.
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

    def __call__(self, stage: Stage, *, last: bool) -> AbstractContextManager[None]:
        """Inside, the stage is trained otherwise; `last` tells whether it is the last one."""


@dc.dataclass(frozen=True, slots=True)
class Lever:
    """One change."""

    changes: tuple[str, ...] = ()
    """of the recipe"""
    later: tuple[str, ...] = ()
    """of the recipe, for the last stage alone"""
    first: float | None = None
    """share of the tokens that the first stage, of short rows, has; None for the recipe's"""
    rates: float = 1.0
    """times the recipe's"""
    patch: Patch = unchanged


FEW = ("mixers.sse+sliding.num_partitions=16",)
"""a quarter of the recipe's states"""
LEVERS = {
    "as it is": Lever(),
    "longer rows earlier": Lever(first=0.3),
    "long rows late": Lever(first=0.85),
    "late positions count more": Lever(patch=late_positions_count_more),
    "last weights averaged": Lever(patch=last_weights_averaged),
    "fewer needles at the end": Lever(later=("data.needles.share=0.3",)),
    "16 partitions": Lever(FEW),
    "16 partitions, half the rates": Lever(FEW, rates=0.5),
    "16 partitions, twice the rates": Lever(FEW, rates=2.0),
}


@dc.dataclass(frozen=True, slots=True)
class Trial:
    """A lever and a seed, with the recipes of the stages before the last one and of that."""

    lever: str
    seed: int
    recipe: Recipe
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
            "tokens": [stage.tokens for stage in self.recipe.stages],
            "kl": {part["length"]: part["kl"] for part in student["agreement"] if "kl" in part},
            "loss": {part["length"]: part["loss"] for part in student["held_out"]},
            "needles": student["needles"],
            "seconds": round(time.monotonic() - start, 1),
        }

    def _trained(self, work: Path) -> Path:
        folder = work / "0-convert"
        if not folder.exists():
            api.convert(self.recipe, out=folder)
        if self.recipe.calibrate.enabled:
            if not (out := work / "1-calibrate").exists():
                api.calibrate(self.recipe, folder, out=out)
            folder = out
        patch, count = LEVERS[self.lever].patch, len(self.recipe.stages)
        for i in range(count):
            recipe = self.last if i + 1 == count else self.recipe
            stage, out = recipe.stages[i], work / f"{i + 2}-{recipe.stages[i].name}"
            with patch(stage, last=i + 1 == count):
                run_stage(recipe, stage, folder, out)
            folder = out
        return folder


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


class Experiment:
    """The trials of a command.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._clock = options, Clock(options.minutes)
        self._trials = [trial(options, name, seed) for seed in range(options.seeds) for name in options.levers]

    def run(self) -> None:
        """Measure what the report lacks."""
        settings = {"recipe": self._options.recipe, "overrides": self._options.set}
        report = resumed_report(self._options.out, settings, "trials")
        done = {(entry["lever"], entry["seed"]) for entry in report["trials"]}
        for one in self._trials:
            if one.key in done or not self._clock.may_start():
                continue
            entry = one.measure(self._options.work / "-".join(map(str, one.key)).replace(",", "").replace(" ", "-"))
            self._clock.took(entry["seconds"])
            report["trials"].append(entry)
            write_json(self._options.out, report)
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
    Experiment(options).run()


if __name__ == "__main__":
    sys.exit(main())
