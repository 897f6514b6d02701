"""Time and peak memory of plan and convert on a checkpoint of 70 billion parameters, in sparse files.

    python -m benchmarks.checkpoints.large --out benchmarks/checkpoints/large.json

The checkpoint has the shape of Llama 3.1 70B, zeros for weights and takes no disk. It is converted with its shards
linked and their digests deferred, as a teacher in the hub's cache is, and as `convert --link hard --defer-digests`.
"""

import argparse
import dataclasses as dc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.checkpoints.memory import LARGEST, conditions, measured
from sse_convert import api
from sse_convert.cli.runner import reporting_errors
from sse_convert.files import write_json
from tests.model_configs import model_config
from tests.surgery.synthetic import checkpoint

RECIPE = "llama-3.1-8b"
"""packaged recipe, for its layers, mixers and stages"""
SHAPE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""what Llama 3.1 70B has instead of 405B"""
SHARDS = 30


def measure(folder: Path, changes: dict[str, Any], shards: int) -> dict[str, Any]:
    """Make the checkpoint, run the commands, and tell what they took.

    Args:
        folder: to make things in.
        changes: the shape.
        shards: files of the checkpoint.
    """
    source = checkpoint(folder / "teacher", model_config(LARGEST, changes), shards=shards)
    recipe = yaml.safe_load(Path(f"recipes/{RECIPE}.yaml").read_text("utf-8"))
    recipe["layers"] = {"pattern": ["sse+sliding*3", "full"]}  # a choice would read weights and text
    recipe |= {"model": str(source), "export": {"dir": str(folder / "exported")}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    plan, planning = measured("plan", path)
    took = dc.asdict(planning) | {"cpu_seconds_after_imports": planning_seconds(path)}
    linked = ("--link", "hard", "--defer-digests")
    report, converting = measured("convert", path, "-o", folder / "converted", *linked)
    return {
        "parameters": plan["parameters"],
        "added_parameters": report["added_parameters"],
        "shards": shards,
        "commands": {"plan": took, "convert": dc.asdict(converting)},
    }


def planning_seconds(recipe: Path) -> float:
    """CPU seconds of a plan in a process that has imported torch and transformers."""
    api.plan(recipe)
    start = time.process_time()
    api.plan(recipe)
    return round(time.process_time() - start, 2)


@reporting_errors
def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_json(asked.out, {**conditions("large"), **measure(Path(folder), SHAPE, SHARDS)})


if __name__ == "__main__":
    sys.exit(main())
