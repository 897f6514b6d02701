"""What `calibrate.key_scale: fit` does for keys with a temperature: untrained, in alignment, after distillation.

    python -m benchmarks.quality.key_temperature --out out/key_temperature.json

Every case (teacher, key feature map, decay calibrated or not, seed) runs twice, with and without the fit and otherwise
alike: convert, calibrate, align, distil, eval. Runs are single-threaded, --workers of them at a time. The JSON is
rewritten after each run; --resume keeps what it has. A table is printed. COMMIT names the commit where
the checkout has no git.
"""

import argparse
import dataclasses as dc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.convert import commit, measure
from benchmarks.quality.select_layers import processor
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.files import write_json

EVAL = "eval={lengths: [256], tokens: 8192}"
TEACHERS = {
    "stories260K": ("recipes/stories260K.yaml", ["stages.1.tokens=128K", EVAL]),
    "demo": (
        "demo/recipe.yaml",
        [
            "layers={pattern: [sse], keep: [4]}",
            "mixers={sse: {kind: sse, num_partitions: 4, top_k: 1, qk_rank: 16, state_heads: query}}",
            "calibrate={rows: 8, seq_len: 256}",
            "data.train=[{kind: teacher, rows: 128, length: 256}]",
            "data.valid=[{kind: teacher, rows: 32, length: 256}]",
            "stages=["
            "{name: align, loss: layer_mse, tokens: 32K, seq_len: 256, lr: 3.0e-3, train: mixers, batch_tokens: 512,"
            " micro_batch: 2},"
            "{name: distill, loss: kl, tokens: 32K, seq_len: 256, lr: {mixers: 1.0e-3, rest: 2.0e-4}, batch_tokens: 1K,"
            " micro_batch: 4}]",
            EVAL,
        ],
    ),
}
"""recipe and what is changed in it; 64 steps of alignment and 32 of distillation each"""
STEPS = 1, 16, 64
"""steps of alignment whose error is kept"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a run is, but for the fit."""

    teacher: str
    k_feature_map: str
    decay: bool
    """whether decays are calibrated"""
    seed: int

    def settings(self, key_scale: str, work: Path) -> tuple[str, list[str]]:
        """Recipe and what is changed in it."""
        recipe, changes = TEACHERS[self.teacher]
        name = "_".join(map(str, (*dc.astuple(self), key_scale)))
        return recipe, [
            *changes,
            f"mixers.sse.k_feature_map={self.k_feature_map}",
            f"calibrate.decay={json.dumps(self.decay)}",
            f"calibrate.key_scale={key_scale}",
            f"train.seed={self.seed}",
            f"data.seed={self.seed}",
            f"export.dir={work / name}",
        ]


def cases(teachers: list[str], seeds: list[int]) -> Iterator[Case]:
    """All cases; without calibrated decays one, since that is a check."""
    for teacher in teachers:
        for kind in ("softmax", "silu"):
            yield from (Case(teacher=teacher, k_feature_map=kind, decay=True, seed=seed) for seed in seeds)
    yield Case(teacher=teachers[0], k_feature_map="softmax", decay=False, seed=seeds[0])


def run(case: Case, key_scale: str, work: Path) -> dict[str, Any]:
    """The figures of one run: loss gaps in nats per token, and alignment's relative errors by step."""
    torch.set_num_threads(1)
    hush_libraries()
    start = time.process_time()
    report = measure(*case.settings(key_scale, work))
    align = report["stages"][0]["out"]
    errors = [json.loads(line)["loss"] for line in (Path(align) / "metrics.jsonl").read_text().splitlines()]
    return {
        **dc.asdict(case),
        "key_scale": key_scale,
        "key_scales": _chosen(Path(align).parent / "01-calibrate"),
        "gap_untrained": report["before"]["loss_gaps"][0],
        "errors": {str(step): errors[step - 1] for step in STEPS},
        "gap": report["after"]["loss_gaps"][0],
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def _chosen(folder: Path) -> dict[str, Any]:
    """Smallest and largest key scale by layer, null where left alone."""
    report = json.loads((folder / "stage.json").read_text(encoding="utf-8"))["report"]
    return {str(layer["index"]): layer["key_scale"] for layer in report["layers"]}


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Rows of the table: means over seeds; for the fit also the smallest and largest change from the run without."""
    groups: dict[tuple[str, str, bool], dict[str, dict[int, dict[str, float]]]] = {}
    for entry in runs:
        by_fit = groups.setdefault((entry["teacher"], entry["k_feature_map"], entry["decay"]), {})
        by_fit.setdefault(entry["key_scale"], {})[entry["seed"]] = _figures(entry)
    lines = []
    for (teacher, kind, decay), found in groups.items():
        head = f"{teacher}, {kind}{'' if decay else ', decay not calibrated'}"
        lines.append(f"| {head} | none | " + " | ".join(_means(found["none"])) + " |")
        spread = zip(_means(found["fit"]), _changes(found), strict=True)
        lines.append(f"| {head} | fit | " + " | ".join(f"{mean} ({change})" for mean, change in spread) + " |")
    return lines


def _figures(entry: dict[str, Any]) -> dict[str, float]:
    return {"before": entry["gap_untrained"]["gap"], **entry["errors"], "after": entry["gap"]["gap"]}


def _means(by_seed: dict[int, dict[str, float]]) -> list[str]:
    return [f"{statistics.mean(values):.3f}" for values in zip(*(f.values() for f in by_seed.values()), strict=True)]


def _changes(found: dict[str, dict[int, dict[str, float]]]) -> list[str]:
    """Smallest and largest change of each figure over the seeds."""
    pairs = [(found["none"][seed], figures) for seed, figures in found["fit"].items()]
    changes = [[now - was for was, now in zip(a.values(), b.values(), strict=True)] for a, b in pairs]
    return [" to ".join(dict.fromkeys(f"{c:+.3f}" for c in (min(x), max(x)))) for x in zip(*changes, strict=True)]


@reporting_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--work", type=Path, default=Path("out/key_temperature"), help="folder for models")
    parser.add_argument("--teachers", nargs="+", choices=TEACHERS, default=list(TEACHERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the JSON has")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "schema": 1,
        "command": " ".join(["python", "-m", "benchmarks.quality.key_temperature", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "torch": torch.__version__,
        "runs": [],
    }
    if options.resume and options.out.is_file():
        report["runs"] = json.loads(options.out.read_text(encoding="utf-8"))["runs"]
    wanted = [(case, kind) for case in cases(options.teachers, options.seeds) for kind in ("none", "fit")]
    measure_all(wanted, report, options)
    print("\n".join(table(report["runs"])))


def measure_all(wanted: list[tuple[Case, str]], report: dict[str, Any], options: argparse.Namespace) -> None:
    """Run what the report lacks, and write it after each run, in the order of `wanted`."""
    order = {json.dumps({**dc.asdict(case), "key_scale": kind}): i for i, (case, kind) in enumerate(wanted)}

    def place(entry: dict[str, Any]) -> int:
        return order[json.dumps({name: entry[name] for name in (*Case.__slots__, "key_scale")})]

    done = {place(entry) for entry in report["runs"]}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        left = [pair for i, pair in enumerate(wanted) if i not in done]
        for future in as_completed(pool.submit(run, *pair, options.work) for pair in left):
            report["runs"] = sorted([*report["runs"], future.result()], key=place)
            write_json(options.out, report)


if __name__ == "__main__":
    sys.exit(main())
