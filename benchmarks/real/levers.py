"""Levers of retrieval without softmax layers, one at a time: needles and KL of a real model after a short training.

    python -m benchmarks.real.levers BOOKS OUT.json --levers "as it is" "one state" [--set stages.0.tokens=8M]

Each lever of `LEVERS` changes one thing about --recipe. BOOKS is a folder of text files that training does not read.
The JSON is rewritten after each training; started again it goes on, and takes folders in --work as they are.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.needles import Judge
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.evaluation.throughput import allocated_cache_bytes
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.surgery.job import Job
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage import run_stage

MIXER = "mixers.sse+sliding"
ONE = (f"{MIXER}.num_partitions=1", f"{MIXER}.advanced.shared_partition=false", f"{MIXER}.advanced.balance=none")
THREE = (f"{MIXER}.num_partitions=3", f"{MIXER}.state_heads=kv", f"{MIXER}.advanced.shared_partition=false")
"""as many bytes as one state per query head, where three query heads share a KV head"""
SPARSE = tuple(
    f"{MIXER}.{text}" for text in ("top_k=2", "update=gla", "k_feature_map=relu", "state_heads=kv", "qk_rank=64")
)
"""what models that keep layers get"""
CODER = [9, 11, 13, 14, 16, 17]
"""the coder's layers by attention on planted facts (`heads_coder.json`)"""
WINDOWS = ("layers.pattern=[sliding]", "calibrate.enabled=false")
BEST = ((7, 2), (18, 2), (17, 1), (23, 0), (20, 1), (15, 2), (21, 2), (20, 2), (23, 2), (14, 1), (14, 0), (8, 0))
"""(layer, KV head) of SmolLM2 that `heads.py` names: its refined six, then what its refined nine and twelve add"""


def kept(count: int) -> str:
    """The first of the best heads, as an override."""
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(BEST[:count]):
        layers.setdefault(layer, []).append(head)
    return f"layers.overrides={{{', '.join(f'{i}: {{full_heads: {heads}}}' for i, heads in layers.items())}}}"


LEVERS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "windows alone": WINDOWS,
    "one state": ONE,
    "one state per KV head": (*ONE, f"{MIXER}.state_heads=kv"),
    "4 partitions": (f"{MIXER}.num_partitions=4",),
    "64 partitions": (f"{MIXER}.num_partitions=64",),
    "one GDN state": (*ONE, f"{MIXER}.advanced.decay=scalar"),
    "one GLA state": (*ONE, f"{MIXER}.update=gla", f"{MIXER}.k_feature_map=silu"),
    "window of 32": (f"{MIXER}.window=32",),
    "fewer planted rows": ("data.needles.share=0.2",),
    **{
        f"{count} heads, {name}": (kept(count), *changes)
        for count in (6, 9, 12)
        for name, changes in {
            "as it is": (),
            "windows alone": WINDOWS,
            "windows of 320 alone": (*WINDOWS, "mixers.sliding.window=320"),
            "one state": ONE,
            "one state per KV head": (*ONE, f"{MIXER}.state_heads=kv"),
            "one state, windows of 256": (*ONE, f"{MIXER}.window=256"),
            "one state, windows of 320": (*ONE, f"{MIXER}.window=320"),
            "one GDN state": (*ONE, f"{MIXER}.advanced.decay=scalar"),
            "one GLA state": (*ONE, f"{MIXER}.update=gla", f"{MIXER}.k_feature_map=silu"),
            "3 partitions per KV head": THREE,
        }.items()
    },
    **{
        f"{count} layers, {name}": (f"layers.keep={keep}", *changes)
        for count, keep in {3: [7, 18, 21], 8: [0, 7, 8, 14, 15, 18, 21, 23]}.items()
        for name, changes in {"windows alone": WINDOWS, "one state": ONE}.items()
    },
    **{
        f"coder, 6 layers, {name}": (f"layers.keep={CODER}", *changes)
        for name, changes in {"windows alone": WINDOWS, "one state": ONE, "as recipes new": SPARSE}.items()
    },
}


def measure(recipe: Recipe, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Convert, calibrate, train and judge."""
    start, stages, last = time.monotonic(), [], work / "converted"
    if not last.exists():
        api.convert(recipe, out=last)
    if recipe.calibrate.enabled:
        if not (work / "calibrated").exists():
            api.calibrate(recipe, last, out=work / "calibrated")
        last = work / "calibrated"
    job, accelerator = Job.of(recipe), make_accelerator(recipe.train)
    for stage in recipe.stages:
        report = run_stage(job, stage, last, work / stage.name, accelerator)
        stages.append(
            {"name": stage.name, "tokens": report.tokens, "seq_len": stage.seq_len, "seconds": round(report.seconds, 1)}
        )
        last = work / stage.name
    return {"stages": stages, **judged(recipe.model, last, options), "seconds": round(time.monotonic() - start, 1)}


@torch.inference_mode()
def judged(teacher: str, student: Path, options: argparse.Namespace) -> dict[str, Any]:
    """KL from the teacher at 2K and 8K tokens, needles by task and length, bytes of the cache of one row at 8K."""
    own = Judge(teacher, options.books, options.device)
    texts = [own.passages(own.judging, length, count) for length, count in ((2048, 16), (8192, 6))]
    expected = [own.expected(ids) for ids in texts]
    judge = Judge(str(student), options.books, options.device)
    longest = judge.model(input_ids=texts[-1][:1], use_cache=True, logits_to_keep=1)
    return {
        "kl": {ids.shape[1]: round(judge.kl(ids, logs), 4) for ids, logs in zip(texts, expected, strict=True)},
        "needles": judge.needles(options.lengths, options.samples),
        "cache_bytes": {8192: allocated_cache_bytes(longest.past_key_values)},
    }


def run(options: argparse.Namespace) -> None:
    """Measure what the report lacks."""
    report: dict[str, Any] = {"recipe": options.recipe, "overrides": options.set, "trials": []}
    if options.out.is_file():
        report = json.loads(options.out.read_text(encoding="utf-8"))
    done = {(trial["lever"], trial["seed"]) for trial in report["trials"]}
    for seed in options.seeds:
        for lever in options.levers:
            if (lever, seed) in done:
                continue
            recipe = load_recipe(options.recipe, [*options.set, *LEVERS[lever], f"train.seed={seed}"])
            work = options.work / f"{lever}-{seed}".replace(",", "").replace(" ", "-")
            work.mkdir(parents=True, exist_ok=True)
            entry = {"lever": lever, "seed": seed, "changes": LEVERS[lever], **measure(recipe, work, options)}
            report["trials"].append(entry)
            write_json(options.out, report)
            say(f"{lever}, seed {seed}: KL {entry['kl']}, needles {entry['needles']}")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("books", type=Path, help="folder of held-out text files")
    p.add_argument("out", type=Path, help="JSON file to write, and to go on with")
    p.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS), metavar="NAME", help=", ".join(LEVERS))
    p.add_argument("--recipe", default="benchmarks/real/none_kept.yaml")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of each lever")
    p.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192], help="tokens of a row")
    p.add_argument("--samples", type=int, default=50, help="needles of each kind and length")
    p.add_argument("--work", type=Path, default=Path("out/real/levers"), help="folder of trainings")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
