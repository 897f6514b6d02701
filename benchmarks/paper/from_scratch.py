"""Table language_modeling in small: models of one shape and random weights learn the same text, by their attention.

    python -m benchmarks.paper.from_scratch --out benchmarks/paper/from_scratch.json       # one CPU core, an hour
    python -m benchmarks.paper.from_scratch --tiny --out tiny.json                         # seconds: shows that it runs

Every model starts from the same random weights of a seed (the shape of the demo's teacher, with as many key-value
heads as query heads) and trains on the same rows with the same rate; only what its layers do differs. As in the paper
all layers are of one kind. The JSON is rewritten after each model; --resume keeps what it has, --minutes starts none
after that time. COMMIT names the commit where the checkout has no git.
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
from benchmarks.paper.random_model import save_random
from benchmarks.paper.verdicts import BySeed, judge, loss_difference
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.files import write_json
from sse_convert.mixers import recipe_entry
from sse_convert.recipe import Recipe, recipe_from_dict

CLAIM = "trained from scratch, SSE has a lower loss than GLA"
SOURCE = "table language_modeling, 600M parameters"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("sliding", {"sinks": 0}),
    "GLA": ("gla", {}),
    "SSE, N = 4, k = 1": ("paper", {}),
    "SSE, N = 4, k = 2": ("paper", {"top_k": 2}),
    "GDN": ("gdn", {}),
    "MoM, N = 4, k = 2": ("mom", {"update": "gla", "decay": "gla", "k_feature_map": "silu"}),
}
"""mixer and settings of all layers; softmax attention is a window as long as a row"""
HEADS = 6
"""key-value heads: as many as the demo's teacher has query heads"""
TINY = {"tokens": 2048, "rows": 64, "step": 256, "held_out": 1024}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="JSON file to write")
    p.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[:3], metavar="NAME",
                   help=", ".join(MODELS))  # fmt: skip
    p.add_argument("--shape", type=Path, default=Path("demo/teacher"), help="folder with config.json and tokenizer")
    p.add_argument("--train", default="../shared/text/tinystories/train_sample.txt", help="text to learn")
    p.add_argument("--valid", default="../shared/text/tinystories/valid.txt", help="held-out text")
    p.add_argument("--tokens", type=int, default=262144, help="of each training")
    p.add_argument("--rows", type=int, default=256, help="tokens per row")
    p.add_argument("--step", type=int, default=2048, help="tokens per optimizer step")
    p.add_argument("--held-out", type=int, default=32768, help="tokens of the measured loss")
    p.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    p.add_argument("--seeds", type=int, default=2, help="trainings of each model")
    p.add_argument("--minutes", type=float, default=float("inf"), help="start no training after this time")
    p.add_argument("--resume", action="store_true", help="keep the models that the JSON has")
    p.add_argument("--tiny", action="store_true", help="a few tokens, to see that it runs")
    return p


def recipe_of(options: argparse.Namespace, name: str, seed: int, folder: Path) -> Recipe:
    """What trains a model: its layers, and one stage of cross entropy."""
    mixer, settings = MODELS[name]
    own = {**settings, "window": options.rows} if mixer == "sliding" else settings
    stage = {
        "name": "pretrain", "loss": "ce", "tokens": options.tokens, "seq_len": options.rows, "lr": options.rate,
        "batch_tokens": options.step, "weight_decay": 0.1,
    }  # fmt: skip
    data = {
        "recipe_version": 1,
        "model": str(folder / "random"),
        "layers": {"pattern": [mixer]},
        "mixers": {mixer: recipe_entry(own)},
        "calibrate": {"enabled": False},
        "stages": [stage],
        "train": {"seed": seed},
        "data": {"train": [{"path": options.train}], "valid": [{"path": options.valid}], "seed": seed},
        "eval": {"lengths": [options.rows], "tokens": options.held_out, "throughput": []},
        "export": {"dir": str(folder / "exported")},
    }
    return recipe_from_dict(data, name)


def trained(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """A model from random weights to its held-out loss in nats per token."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save_random(options.shape, str(options.shape), folder / "random", seed=seed, heads=HEADS)
        recipe = recipe_of(options, name, seed, folder)
        plan = api.plan(recipe)
        api.convert(recipe, folder / "hybrid")
        report = api.uptrain(recipe, folder / "hybrid", folder / "trained")
        found = api.evaluate(recipe, folder / "trained")
    return {
        "name": name,
        "seed": seed,
        "parameters": plan.parameters + plan.added_parameters,
        "tokens": report.tokens,
        "loss": found.student.held_out[0].loss,
        "at_random": found.teacher.held_out[0].loss,
        "seconds": round(time.monotonic() - began, 1),
    }


def losses(runs: list[dict[str, Any]]) -> BySeed:
    """Held-out losses by model, of the seeds that all of them have."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    by_run = {(run["name"], run["seed"]): run["loss"] for run in runs}
    seeds = [seed for seed in sorted({run["seed"] for run in runs}) if all((name, seed) in by_run for name in names)]
    return {name: [by_run[name, seed] for seed in seeds] for name in names} if seeds else {}


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether SSE is ahead of GLA, and what softmax attention is ahead of SSE by."""
    figures, sse = losses(runs), list(MODELS)[2]
    ahead = loss_difference(figures, sse, "GLA")
    return {
        "outcome": judge([ahead]),
        "sse_over_gla": dc.asdict(ahead),
        "softmax_over_sse": dc.asdict(loss_difference(figures, "softmax", sse)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report, written after each model."""
    began, report = time.monotonic(), _report(options)
    runs = report["runs"]
    known = {(run["name"], run["seed"]) for run in runs}
    for name, seed in [(name, seed) for seed in range(options.seeds) for name in options.models]:
        if (name, seed) in known or time.monotonic() - began > 60 * options.minutes:
            continue
        runs.append({"commit": report["environment"]["commit"], **trained(options, name, seed)})
        report["verdict"] = verdict(runs)
        write_json(options.out, report)
        say(f"{name} (seed {seed}): {runs[-1]['loss']:.4f} nats per token, {runs[-1]['seconds']:.0f} s")
    return report


def _report(options: argparse.Namespace) -> dict[str, Any]:
    left_out = ("out", "models", "seeds", "minutes", "resume", "tiny")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
                if name not in left_out}  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {"schema": 1, "environment": environment(device), "settings": settings, "claim": CLAIM, "source": SOURCE,
              "runs": [], "verdict": verdict([])}  # fmt: skip
    if options.resume and options.out.is_file():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        if earlier["settings"] != settings:
            raise UsageError(f"{options.out} was measured with other settings", fix="leave out --resume")
        report |= {name: earlier[name] for name in ("runs", "verdict")}
    return report


def lines(report: dict[str, Any]) -> list[str]:
    """For a person."""
    found = report["verdict"]
    rows = [f"{report['claim']}: {found['outcome']}"]
    for key in ("sse_over_gla", "softmax_over_sse"):
        own = found[key]
        if own["by"] is not None:
            doubt = "unknown, one seed" if own["doubt"] is None else f"{own['doubt']:.3f}"
            rows.append(f"    {own['better']} over {own['worse']}: {own['by']:+.3f} ± {doubt} nats per token")
    return rows


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = parser()
    if "--tiny" in (sys.argv[1:] if arguments is None else arguments):
        p.set_defaults(**TINY)
    options = p.parse_args(arguments)
    hush_libraries()
    say("\n".join(lines(measure(options))))


if __name__ == "__main__":
    sys.exit(main())
