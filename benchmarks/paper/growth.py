"""Growing N and k of a trained checkpoint ("state up-training"): what changes at once, and what training makes of it.

    python -m benchmarks.paper.growth --out benchmarks/paper/growth.json       # one CPU core, a quarter of an hour
    python -m benchmarks.paper.growth --tiny --out growth.json                 # a few tokens: shows that it runs

A model is converted and trained (384K tokens), then expanded in each way of WAYS; the change of its predictions is
measured on held-out text. The ways of TRAINED, and as control the model as it was, are distilled on the same further
tokens (262K), each with several seeds: measured are the share of tokens that new partitions get and the held-out loss
beside the control's, by which the claim is judged. COMMIT names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.paper.growth_plot import draw
from benchmarks.paper.verdicts import judge, loss_difference, mean
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.evaluation.intervals import Z95
from sse_convert.evaluation.perplexity import HeldOutLoss, loss_gap
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.surgery.growth import Growth

CLAIM = "with shared parameters SSE moves smoothly between N and k and recovers quickly, without extensive retraining"
SOURCE = "section Limitations and Future Work"
MARGIN = 0.01
"""nats per token; a grown model at most this much worse than the control has recovered"""
CONTROL = "as it was"
WAYS = {
    "N = 8, random": Growth(num_partitions=8, init="random", shift=0),
    "N = 8": Growth(num_partitions=8, shift=0),
    "N = 8, shift 2": Growth(num_partitions=8, shift=2),
    "N = 8, shift 4": Growth(num_partitions=8, shift=4),
    "N = 8, shift 6": Growth(num_partitions=8, shift=6),
    "N = 8, random, shift 6": Growth(num_partitions=8, init="random", shift=6),
    "N = 16, shift 6": Growth(num_partitions=16, shift=6),
    "k = 2": Growth(top_k=2),
    "N = 8, k = 2": Growth(num_partitions=8, top_k=2, shift=0),
    "N = 8, k = 2, shift 6": Growth(num_partitions=8, top_k=2, shift=6),
}
"""new router rows are copies of the old ones where nothing else is said"""
TRAINED = ("N = 8", "N = 8, shift 2", "N = 8, shift 6", "k = 2")
BUDGET = ("stages.0.tokens=128K", "stages.1.tokens=256K")
TINY = ("stages.0.tokens=8K", "stages.1.tokens=8K", "eval.tokens=4096")
TOKENS = 4096
"""of held-out text, for the share of new partitions"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A checkpoint to train on."""

    folder: Path
    """converted checkpoint"""
    recipe: list[str]
    """what its recipe is overridden with"""
    partitions: int
    """N before growth; partitions from here on are new"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A checkpoint after further training."""

    seed: int
    """order of the text"""
    distillation_loss: float | None
    """KL to the teacher in nats per token, mean of the last steps"""
    held_out: HeldOutLoss
    """on the same windows for all"""
    in_use: dict[int, float]
    """by layer, share of tokens written to new partitions; empty where there are none"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the windows."""
        own = {f.name: getattr(self, f.name) for f in dc.fields(self)}
        return {**own, "held_out": self.held_out.loss}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot lies beside it")
    p.add_argument(
        "--recipe", default="recipes/stories260K.yaml", help="SSE with N = 4, k = 1; stages align and distill"
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--seeds", type=int, default=2, help="further trainings of each checkpoint")
    p.add_argument("--tiny", action="store_true", help="a few tokens, to see that it runs")
    return p


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; the report.

    Args:
        options: as `parser` gives them.
        folder: for the checkpoints, empty.

    Raises:
        UsageError: no seed.
        RecipeError, DataError, CheckpointError: recipe, text or model do not do.
    """
    if options.seeds < 1:
        raise UsageError(f"seeds is {options.seeds}", expected="at least 1")
    began = time.monotonic()
    overrides = [*(TINY if options.tiny else BUDGET), *options.set]
    recipe = load_recipe(options.recipe, overrides)
    base = _base(recipe, folder)
    ways, starts = _grown(base, recipe, overrides, folder)
    starts = {CONTROL: Start(folder=base, recipe=overrides, partitions=starts[TRAINED[0]].partitions), **starts}
    at_start = {name: api.evaluate(_recipe(options, start), start.folder).student for name, start in starts.items()}
    trained = {
        name: [_trained(options, start, folder / f"{name}, seed {seed}", seed) for seed in range(options.seeds)]
        for name, start in starts.items()
    }
    return {
        "schema": 1,
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "settings": {"recipe": options.recipe, "overrides": overrides, "seeds": options.seeds, "margin": MARGIN},
        "seconds": round(time.monotonic() - began),
        "claim": CLAIM,
        "source": SOURCE,
        "verdicts": verdicts({name: [own.held_out for own in runs] for name, runs in trained.items()}),
        "ways": ways,
        "trained": {
            name: {"held_out_at_start": at_start[name].held_out[0].loss, "runs": [own.to_dict() for own in runs]}
            for name, runs in trained.items()
        },
    }


def verdicts(held_out: dict[str, list[HeldOutLoss]]) -> dict[str, Any]:
    """Whether grown models recover to within MARGIN of the control, and whether they gain over it.

    Args:
        held_out: by checkpoint that was trained on, one per seed; CONTROL among them.
    """
    losses = {name: [own.loss for own in runs] for name, runs in held_out.items()}
    grown = [name for name in held_out if name != CONTROL]
    found = [loss_difference(losses, name, CONTROL, text_doubt=_text_doubt(held_out, name)) for name in grown]
    within = [dc.replace(d, by=None if d.by is None else d.by + MARGIN) for d in found]
    rows = [
        {"way": d.better, "better_by": d.by, "doubt": d.doubt, "recovers": judge([near]), "gains": judge([d])}
        for d, near in zip(found, within, strict=True)
    ]
    return {"recovers": judge(within), "gains": judge(found), "ways": rows}


def _text_doubt(held_out: dict[str, list[HeldOutLoss]], name: str) -> float:
    """Half width of the 95% interval that the choice of the windows leaves to the loss beside the control's."""
    pairs = zip(held_out[name], held_out[CONTROL], strict=True)
    return Z95 * mean([loss_gap(own, control)[1] or 0.0 for own, control in pairs])


def _base(recipe: Recipe, folder: Path) -> Path:
    """The checkpoint that is grown: converted, calibrated, aligned, distilled."""
    api.convert(recipe, folder / "converted")
    api.calibrate(recipe, folder / "converted", folder / "calibrated")
    api.align(recipe, folder / "calibrated", folder / "aligned")
    api.distill(recipe, folder / "aligned", folder / "base")
    return folder / "base"


def _grown(
    base: Path, recipe: Recipe, overrides: list[str], folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, Start]]:
    """The base grown in all ways: what each changed, and where those of TRAINED start."""
    ways, starts = {}, {}
    for name, growth in WAYS.items():
        report = api.expand(base, folder / name, **dc.asdict(growth), text=recipe.data.valid[0].path)
        assert report.change is not None
        ways[name] = {"growth": dc.asdict(growth), "change": dc.asdict(report.change)}
        say(f"{name}: KL {report.change.kl:.1e}, same first choice {report.change.same_choice:.1%}")
        if name in TRAINED:
            own = [f"mixers.{mixer}={json.dumps(settings)}" for mixer, settings in report.mixers.items()]
            before, _ = report.layers[0].partitions
            starts[name] = Start(folder=folder / name, recipe=[*overrides, *own], partitions=before)
    return ways, starts


def _recipe(options: argparse.Namespace, start: Start, *more: str) -> Recipe:
    return load_recipe(options.recipe, [*start.recipe, *more])


def _trained(options: argparse.Namespace, start: Start, out: Path, seed: int) -> Trained:
    """Distil further; the text comes in another order than the base had it, the same for all of a seed."""
    recipe = _recipe(options, start)
    again = _recipe(
        options, start, f"train.seed={recipe.train.seed + 1 + seed}", f"data.seed={recipe.data.seed + 1 + seed}"
    )
    report = api.distill(again, start.folder, out)
    own = Trained(
        seed=seed,
        distillation_loss=report.loss_last,
        held_out=api.evaluate(recipe, out).student.held_out[0],
        in_use=_in_use(out, recipe, start.partitions),
    )
    say(f"{out.name}: held-out loss {own.held_out.loss:.4f}, in use {_range(own.in_use)}")
    return own


def _in_use(checkpoint: Path, recipe: Recipe, before: int) -> dict[int, float]:
    text = recipe.data.valid[0].path
    assert text is not None
    shares = {}
    for layer in api.analyze(checkpoint, text, tokens=TOKENS).layers:
        load = layer.quantities.get("routing", {}).get("load", [])
        if len(load) > before:
            shares[layer.index] = sum(load[before:]) / sum(load)
    return shares


def _range(shares: dict[int, float]) -> str:
    return f"{min(shares.values()):.0%} to {max(shares.values()):.0%}" if shares else "nothing new"


def _lines(found: dict[str, Any]) -> list[str]:
    return [
        f"recovers: {found['recovers']}; gains: {found['gains']}",
        *(
            f"    {row['way']}: {row['better_by']:+.4f} ± {_doubt(row['doubt'])} nats better than the control; "
            f"recovers {row['recovers']}, gains {row['gains']}"
            for row in found["ways"]
        ),
    ]


def _doubt(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    write_json(options.out, report)
    draw(report, options.out.with_suffix(".png"))
    say("\n".join(_lines(report["verdicts"])))


if __name__ == "__main__":
    sys.exit(main())
