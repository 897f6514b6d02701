"""Run a recipe and measure it before and after training, beside its teacher.

    python benchmarks/quality/convert.py recipes/teacher-qwen3-32m.yaml --out out/keep-0-7.json

`before` is the checkpoint that training starts from (converted and calibrated), on the text and needles of `after`;
with --no-before it is null. `controls` is the table of the recipe's controls, as far as they were run.
COMMIT names the commit where the checkout has no git.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json
from sse_convert.recipe import load_recipe


def commit() -> str:
    """The checkout's commit, `+changes` if the package differs from it."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "sse_convert", "recipes")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def measure(recipe_file: str, overrides: list[str], *, untrained: bool = True) -> dict[str, Any]:
    """Run the recipe; plan, steps, and the figures of teacher, trained and, if `untrained`, untrained student."""
    recipe, version = load_recipe(recipe_file, overrides), commit()
    plan = api.plan(recipe).to_dict()
    start = time.monotonic()
    run = api.run(recipe)
    seconds = time.monotonic() - start
    say("\n".join(run.lines()))
    folders = {step["name"]: step["folder"] for step in run.steps}
    after = json.loads((Path(folders["eval"]) / "evaluation.json").read_text(encoding="utf-8"))
    before = None
    if untrained:
        before = api.evaluate(recipe, folders["calibrate" if recipe.calibrate.enabled else "convert"])
        say("\n".join(["the model before training:", *before.lines()]))
    return {
        "schema": 1,
        "command": " ".join(["python", *sys.argv]),
        "commit": version,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": after["conditions"]["device"],
        "python": platform.python_version(),
        "run_seconds": round(seconds, 1),
        "training_tokens": sum(stage.tokens for stage in recipe.stages),
        "recipe": recipe.to_dict(),
        "layers": [row["mixer"] for row in plan["layers"]],
        "stages": [step["report"] for step in run.steps if step["name"] in {stage.name for stage in recipe.stages}],
        "before": None if before is None else before.to_dict(),
        "after": after,
        "controls": None if run.controls is None else run.controls.to_dict(),
    }


@reporting_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--no-before", action="store_true", help="leave out the model before training")
    options = parser.parse_args()
    hush_libraries()
    report = measure(options.recipe, options.set, untrained=not options.no_before)
    write_json(options.out, report)


if __name__ == "__main__":
    sys.exit(main())
