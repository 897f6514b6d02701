"""Figure mqa_topk of the paper: associative recall of GLA, MetaLA and GSA, dense and with top-k row-sparse updates.

    python -m benchmarks.paper.mqar_topk --out benchmarks/paper/mqar_topk.json     # a GPU, a few minutes
    python -m benchmarks.paper.mqar_topk --tiny --out tiny.json                    # a CPU, seconds; learns nothing yet

The paper gives two layers, two heads, k = d/4, setting 1 (zeros between pairs and queries) and setting 2 (noise). Ours,
because it gives nothing: the published generator of the task with the defaults below, a causal convolution of four
tokens in front of every mixer (MetaLA's own), as many slots in GSA as a head has dims, k = a quarter of a head's rows,
three learning rates of which validation rows choose one per point, and equal first weights and data order for dense and
row-sparse models. All models of a mixer and width train at once. Writes the JSON after each width, and a PNG beside it;
--resume goes on with an unfinished one, other mixers and widths included, and within a training from what --minutes or
a kill left beside the JSON. --best-of takes each point's rate from an earlier figure:

    python -m benchmarks.paper.mqar_topk --mixers gla metala --widths 32 --steps 10000 --seeds 8 --minutes 9 --resume \\
        --best-of benchmarks/paper/mqar_topk.json --out out/mqar_long.json          # a GPU; the same command goes on

COMMIT names the commit where the checkout has no git.
"""

import argparse
import json
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.kernels.hybrid_measure import environment, release
from benchmarks.paper.row_sparse.figure import SETTINGS, draw
from benchmarks.paper.row_sparse.mixers import MixerName
from benchmarks.paper.row_sparse.model import ModelSettings
from benchmarks.paper.row_sparse.mqar import MQAR, segment_seeds
from benchmarks.paper.row_sparse.recall import Budget, Pause, Paused, Questions, Run, answers, train
from benchmarks.paper.row_sparse.results import Cell, Claim, claims, score
from benchmarks.paper.row_sparse.update import RowDecay, RowSparse
from sse_convert.cli.runner import reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.files import write_json

_MIXERS = get_args(MixerName)
PUBLISHED_SEED = 123
"""from which the task's published configurations draw the seeds of their segments"""
TINY = {
    "widths": [8, 16], "length": 16, "pairs": 2, "vocab": 32, "train": 512, "valid": 64, "test": 64, "steps": 40,
    "batch": 16, "rates": [1e-2], "seeds": 1,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="JSON file to write; the PNG gets its name")
    p.add_argument("--tiny", action="store_true", help="the smallest sizes, to see that it runs")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--mixers", nargs="+", choices=_MIXERS, default=["gla", "metala", "gsa"])
    p.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128], help="model dimensions")
    p.add_argument("--length", type=int, default=128, help="tokens of a row")
    p.add_argument("--pairs", type=int, default=16, help="key-value pairs of a row")
    p.add_argument("--vocab", type=int, default=512)
    p.add_argument("--train", type=int, default=50_000, help="training rows")
    p.add_argument("--valid", type=int, default=500, help="rows that choose the learning rate")
    p.add_argument("--test", type=int, default=1000, help="rows of the figure")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--batch", type=int, default=64, help="rows per step and model")
    p.add_argument("--rates", type=float, nargs="+", default=[5e-3, 1e-2, 2e-2], help="learning rates")
    p.add_argument("--best-of", metavar="JSON", help="take the best learning rate of each point from this figure")
    p.add_argument("--seeds", type=int, default=3, help="models per point and learning rate")
    p.add_argument("--rows", type=float, default=0.25, help="share of a head's state rows that a token updates")
    p.add_argument("--row-decay", choices=get_args(RowDecay), default="selected", help="which rows decay")
    p.add_argument("--convolution", type=int, default=4, help="tokens, 0 for none")
    p.add_argument("--eager", action="store_true", help="on a GPU, no CUDA graphs")
    p.add_argument("--resume", action="store_true", help="keep what the JSON has, measure the rest")
    p.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time; --resume goes on")
    p.add_argument("--balance", type=float, default=0.0, help="coefficient of the row balance loss")
    return p


def runs_of(options: argparse.Namespace, settings: ModelSettings) -> list[Run]:
    """All models of a mixer and width; models with the same update stand together."""
    sparse = RowSparse(rows=max(1, round(options.rows * settings.rows)), decay=options.row_decay)
    return [
        Run(noise=noise, update=update, learning_rate=rate, seed=seed)
        for update in (None, sparse)
        for noise in (False, True)
        for rate in _rates(options, settings, noise, update)
        for seed in range(options.seeds)
    ]


def _rates(options: argparse.Namespace, settings: ModelSettings, noise: bool, update: RowSparse | None) -> list[float]:
    """Learning rates to try at a point."""
    if options.best_of is None:
        rates: list[float] = options.rates
        return rates
    own = (settings.mixer, settings.width, noise, update.rows if update else None)
    for cell in json.loads(Path(options.best_of).read_text(encoding="utf-8"))["cells"]:
        if (cell["mixer"], cell["width"], cell["noise"], cell["rows"]) == own:
            return [cell["learning_rate"]]
    raise UsageError(
        f"{options.best_of} has no point of {settings.mixer} at width {settings.width}",
        expected="a figure that has it",
        fix="leave out --best-of, or other --mixers and --widths",
    )


def data(options: argparse.Namespace, device: torch.device) -> tuple[Questions, Questions, Questions]:
    """Training, validation and test rows."""
    task = MQAR(length=options.length, pairs=options.pairs, vocab_size=options.vocab)
    (train_seed,), held_out = segment_seeds(PUBLISHED_SEED, 1, 2)
    sizes = zip((options.train, options.valid, options.test), (train_seed, *held_out), strict=True)
    first, second, third = (Questions.draw(task, size, seed, device) for size, seed in sizes)
    return first, second, third


def measure(options: argparse.Namespace, device: torch.device) -> tuple[list[Cell], list[Claim]]:
    """Train and score everything that the JSON does not have, writing what there is after each width."""
    end = time.monotonic() + 60 * options.minutes
    parts = _kept(options) if options.resume else []
    training, validation, test = data(options, device)
    budget = Budget(steps=options.steps, batch=options.batch, balance=options.balance, capture=not options.eager)
    known = {(part["mixer"], part["width"]) for part in parts}
    for mixer, width in (pair for pair in product(options.mixers, options.widths) if pair not in known):
        began = time.monotonic()
        settings = ModelSettings(mixer=mixer, width=width, vocab_size=options.vocab, convolution=options.convolution)
        runs = runs_of(options, settings)
        pause = Pause(path=options.out.with_name(f"{options.out.stem}_{mixer}_{width}.pt"), end=end)
        if not options.resume:
            pause.path.unlink(missing_ok=True)
        try:
            model = train(settings, runs, training, budget, pause)
        except Paused:
            say(f"{mixer} {width}: time is over, {pause.path} is kept; the same command with --resume goes on")
            break
        own = score(settings, runs, answers(model, runs, validation), answers(model, runs, test), test)
        seconds, commit = time.monotonic() - began, environment(device)["commit"]
        timing = {"mixer": mixer, "width": width, "models": len(runs), "seconds": seconds, "commit": commit}
        parts.append({**timing, "cells": own})
        parts.sort(key=lambda part: (_MIXERS.index(part["mixer"]), part["width"]))
        say(f"{mixer} {width}: {_line(own)} ({len(runs)} models, {seconds:.1f} s)")
        _write(options, device, parts)
        pause.path.unlink(missing_ok=True)
        del model
        release(device)
    _write(options, device, parts)  # also where nothing was missing: the claims may be of fewer points
    cells = [cell for part in parts for cell in part["cells"]]
    return cells, claims(cells)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What every cell of a figure has in common."""
    own = ("out", "resume", "minutes", "mixers", "widths")
    return {name: value for name, value in vars(options).items() if name not in own}


def _kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What an earlier run measured: a mixer and width each, with its timing and cells."""
    if not options.out.is_file():
        return []
    report = json.loads(options.out.read_text(encoding="utf-8"))
    earlier = {name: report["settings"].get(name) for name in _settings(options)}
    if different := [name for name, value in _settings(options).items() if earlier[name] != value]:
        raise UsageError(
            f"{options.out} was measured with other settings: "
            + ", ".join(f"{name} {earlier[name]}, now {getattr(options, name)}" for name in different),
            expected="the same settings, other mixers and widths at most",
            fix="leave out --resume, or write to another file",
        )
    cells = [Cell.from_dict(data) for data in report["cells"]]
    commit = report["environment"]["commit"]
    return [
        {
            "commit": commit,
            **timing,
            "cells": [cell for cell in cells if (cell.mixer, cell.width) == (timing["mixer"], timing["width"])],
        }
        for timing in report["timings"]
    ]


def _write(options: argparse.Namespace, device: torch.device, parts: list[dict[str, Any]]) -> None:
    cells = [cell for part in parts for cell in part["cells"]]
    timings = [{name: value for name, value in part.items() if name != "cells"} for part in parts]
    report = {
        "schema": 2,
        "environment": environment(device),
        "settings": _settings(options),
        "seconds": round(sum(timing["seconds"] for timing in timings), 1),
        "timings": timings,
        "cells": [cell.to_dict() for cell in cells],
        "claims": claims(cells),
    }
    write_json(options.out, report)


def _line(cells: list[Cell]) -> str:
    return ", ".join(
        f"{'noise' if c.noise else 'zeros'} {'dense' if c.rows is None else f'k={c.rows}'} {c.accuracy.mean:.1%}"
        for c in cells
    )


def verdict(found: list[Claim]) -> list[str]:
    """The claims, panel by panel, and how often each holds."""
    lines = []
    for claim in dict.fromkeys(c.claim for c in found):
        own = [c for c in found if c.claim == claim]
        counts = ", ".join(f"{outcome} in {n}" for outcome, n in Counter(c.outcome for c in own).items())
        ahead, behind, pairs = (sum(getattr(c, name) for c in own) for name in ("ahead", "behind", "pairs"))
        lines.append(f"{claim}: {counts} of {len(own)} panels; true of {ahead} and false of {behind} of {pairs} pairs")
        for c in own:
            differences = ", ".join(f"{100 * value:+.1f} ± {100 * doubt:.1f}" for value, doubt in c.differences)
            lines.append(f"    {c.mixer}, {SETTINGS[c.noise]}: {c.outcome} ({differences} points)")
    return lines


def _conditions(options: argparse.Namespace, device: torch.device) -> str:
    own = environment(device)
    return (
        f"2 layers, 2 heads, {options.length} tokens, {options.pairs} pairs, vocabulary {options.vocab}; "
        f"{options.steps} steps of {options.batch} rows, {options.seeds} seeds\n"
        f"{own['device']}, torch {own['torch']}, commit {own['commit']}"
    )


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = parser()
    if "--tiny" in (sys.argv[1:] if arguments is None else arguments):
        p.set_defaults(**TINY)
    options = p.parse_args(arguments)
    if not 0 < options.rows < 1 or options.seeds < 1:
        raise UsageError(
            f"rows {options.rows}, seeds {options.seeds}", expected="rows between 0 and 1, at least one seed"
        )
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    cells, found = measure(options, device)
    if not cells:
        return
    draw(cells, options.out.with_suffix(".png"), conditions=_conditions(options, device))
    if not options.tiny:
        say("\n".join(verdict(found)))


if __name__ == "__main__":
    sys.exit(main())
