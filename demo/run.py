"""The demo: convert the small teacher in `demo/teacher`, train the result, and show what was kept. Offline, on a CPU.

    python demo/run.py [--out out/demo] [--set layers.keep=[2,5] ...]

Runs `demo/recipe.yaml` from plan to export, then measures the untrained conversion with the same text and needles.
Leaves in the output folder: `model/` (the finished checkpoint), `model.stages/` (every step), and
`report.json`. Started again with the same recipe, it continues where it stopped.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sse_convert.cli.runner import UserInterruptError, hush_libraries, reporting_errors
from sse_convert.console import progress, say
from sse_convert.evaluation.intervals import wilson
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.report import format_bytes, json_ready, table

HERE = Path(__file__).parent
CACHE_LENGTHS = (512, 2048, 32 * 1024, 128 * 1024)
MODELS = ("teacher", "converted", "after training")


def demo(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Run the recipe and measure the untrained conversion; writes `report.json`.

    Args:
        recipe: its `export.dir` must lie in `out`.
        out: folder of the file.

    Returns:
        What `report.json` holds: the plan, what each step reported, and the figures of the three models.
    """
    from sse_convert import api

    started = time.monotonic()
    plan = api.plan(recipe)
    say("\n".join(plan.lines()))
    run = api.run(recipe)
    steps = {step["name"]: Path(step["folder"]) for step in run.steps}
    trained = json.loads((steps["eval"] / "evaluation.json").read_text(encoding="utf-8"))
    converted = {**trained, "student": measure_untrained(recipe, steps["convert"])}
    result = {
        "schema": 1,
        "seconds": round(time.monotonic() - started, 1),
        "plan": plan.to_dict(),
        "run": run.to_dict(),
        "converted": converted["student"],
        "evaluation": trained,
    }
    (out / "report.json").write_text(json.dumps(json_ready(result), indent=1) + "\n", encoding="utf-8")
    return result


def measure_untrained(recipe: Recipe, checkpoint: Path) -> dict[str, Any]:
    """Figures of a checkpoint on the held-out text and needles that the recipe's evaluation uses."""
    from sse_convert.checkpoints.load_model import load_model, load_tokenizer, pick_device
    from sse_convert.evaluation.evaluate import measure_model
    from sse_convert.evaluation.tasks import make_tasks
    from sse_convert.surgery.job import Job

    job = Job.of(recipe)
    tasks = make_tasks(job, load_tokenizer(checkpoint))
    model = load_model(checkpoint, device=str(pick_device())).float()
    with progress("evaluating the untrained conversion", tasks.steps) as bar:
        return measure_model(model, tasks, name=str(checkpoint), sizes=job.geometry(), bar=bar).to_dict()


def lines(result: dict[str, Any]) -> list[str]:
    """The tables a person reads."""
    evaluation = result["evaluation"]
    models = [evaluation["teacher"], result["converted"], evaluation["student"]]
    rows: list[list[str]] = []
    for entries in zip(*(model["held_out"] for model in models), strict=True):
        name = f"held-out loss, {entries[0]['length']:,} tokens"
        rows.append([name, *(f"{e['loss']:.3f} ± {e['loss_high'] - e['loss']:.3f}" for e in entries)])
        rows.append(["  bits per byte", *(f"{e['bits_per_byte']:.3f}" for e in entries)])
    for entries in zip(*(model["needles"] for model in models), strict=True):
        first = entries[0]
        name = f"{first['kind']} needle, {first['keys']} keys, {first['length']:,} tokens"
        rows.append([name, *(_share(e["correct"], e["samples"]) for e in entries)])
    for entries in zip(*(model["speed"] for model in models), strict=True):
        length = f"{entries[0]['length']:,} tokens"
        rows.append([f"prefill tokens/s, {length}", *(f"{e['prefill_tokens_per_s']:,.0f}" for e in entries)])
        rows.append([f"decode tokens/s, {length}", *(f"{e['decode_tokens_per_s']:,.0f}" for e in entries)])
    cache = [
        [
            f"{r['length']:,}",
            *(format_bytes(r[key]) for key in ("teacher_bytes", "student_bytes", "student_state_bytes")),
        ]
        for r in evaluation["cache"]
        if r["length"] in CACHE_LENGTHS
    ]
    return [
        *table(("", *MODELS), rows),
        "",
        "memory of one sequence, weights apart:",
        *table(("tokens", "teacher's KV cache", "hybrid", "of that, SSE state"), cache),
    ]


def _share(correct: int, samples: int) -> str:
    low, high = wilson(correct, samples)
    return f"{100 * correct / samples:.0f}% [{100 * low:.0f}, {100 * high:.0f}]"


@reporting_errors
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="output folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    args = parser.parse_args()
    hush_libraries()
    os.environ.setdefault("SSE_CONVERT_CACHE", str(args.out / "cache"))
    places = [f"model={HERE / 'teacher'}", f"export.dir={args.out / 'model'}"]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        result = demo(load_recipe(HERE / "recipe.yaml", [*places, *args.set]), args.out)
    except KeyboardInterrupt as interrupt:
        fix = f"the same command goes on from what is in {args.out}"
        raise UserInterruptError(interrupt, fix=fix) from interrupt
    print("\n".join(lines(result)))
    say(f"{result['seconds']:.0f} seconds; {args.out}/report.json, model in {args.out}/model")


if __name__ == "__main__":
    sys.exit(main())
