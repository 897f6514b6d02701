"""A packaged recipe from its first step to the exported model, on the true shape of its model.

    python benchmarks/training/whole_run.py qwen3-0.6b --out out/whole_run.json
    python benchmarks/training/whole_run.py qwen3-8b --layers 9 --gpus 2 --out out/whole_run.json

Weights and text are random. The recipe changes in where model and text come from, in the tokens of its stages
(`--steps` steps each), and in the text of `eval`. The JSON has each stage's steps, and the end of the log, each line
after its seconds. `--tiny` tries the script on a CPU.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml
from fsdp_smoke import (
    FSDP,
    TINY_ROW,
    TINY_STEP,
    TWO,
    Memory,
    kill,
    make_teacher,
    make_text,
    surroundings,
    unwind_when_terminated,
)

from sse_convert.recipe import load_recipe
from sse_convert.recipe.schema import Recipe
from sse_convert.training.metrics import read

CONFIGS = Path("tests/fixtures/configs")
HELD_OUT = "held-out.txt"
EVAL = {"lengths": ["4K"], "tokens": "32K", "needle": {"lengths": ["4K"], "samples": 8}}
TINY_EVAL = {"lengths": [128], "tokens": 512, "needle": {"lengths": [128], "samples": 2, "keys": [1]}}


def make_shape(name: str, work: Path, layers: int | None, *, tiny: bool) -> None:
    """Write teacher and text below `work`; of so many layers, where a number is given."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    if layers is not None:
        raw |= {"num_hidden_layers": layers, "max_window_layers": layers}
        raw.pop("layer_types", None)
    config = work / "config.json"
    work.mkdir(parents=True)
    config.write_text(json.dumps(raw))
    tokenizer = make_text(work / "text", 4 if tiny else 20)
    (work / "text" / "0.txt").rename(work / HELD_OUT)
    make_teacher(config, work / "teacher", tokenizer, tiny=tiny)


def make_recipe(name: str, work: Path, steps: int, *, tiny: bool) -> Path:
    """Write the recipe with this model and this text, its stages of so many steps."""
    raw = yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())
    packaged = load_recipe(name)
    for stage, read_stage in zip(raw["stages"], packaged.stages, strict=True):
        if tiny:
            stage |= {"seq_len": TINY_ROW, "batch_tokens": TINY_STEP}
        stage["tokens"] = steps * (TINY_STEP if tiny else read_stage.batch_tokens)
    raw |= {"model": str(work / "teacher"), "eval": TINY_EVAL if tiny else EVAL}
    raw["data"] |= {"train": [{"path": str(work / "text")}], "valid": [{"path": str(work / HELD_OUT)}]}
    raw["export"] = {"dir": str(work / "exported")}
    if tiny:
        raw["data"].pop("needles", None)
        raw["calibrate"] = {"rows": 2, "seq_len": 2 * TINY_ROW}
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def stages(recipe: Recipe, work: Path) -> dict[str, Any]:
    """What every training stage logged: seconds and loss of its steps, tokens per second of the median warm one."""
    found = {}
    for stage in recipe.stages:
        for log in (work / "exported.stages").glob(f"*{stage.name}*/metrics.jsonl"):
            records = read(log)
            warm = [record["seconds"] for record in records[1:]]
            found[stage.name] = {
                "step_seconds": [record["seconds"] for record in records],
                "losses": [record["loss"] for record in records],
                "tokens_per_second": stage.batch_tokens / statistics.median(warm) if warm else None,
            }
            chosen = log.with_name("chosen.json")
            if chosen.is_file():
                found[stage.name]["chosen"] = json.loads(chosen.read_text())
    return found


def run(recipe: Path, work: Path, seconds: float, gpus: int) -> dict[str, Any]:
    """Run it as a user does; how it ended, the most memory the GPUs had, and its log, each line after its seconds."""
    launch = ["-m", "accelerate.commands.launch", *shlex.split(f"{FSDP} {TWO}")] if gpus == 2 else []
    command = [sys.executable, "-u", *launch, "-m", "sse_convert", "run", str(recipe)]
    began, lines = time.monotonic(), []
    with Memory() as memory:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        late = threading.Timer(seconds, kill, [process])
        late.start()
        for line in process.stdout or ():
            lines.append(f"{time.monotonic() - began:6.1f} {line.rstrip()}")
        code = process.wait()
        ended = f"code {code}" if late.is_alive() else "out of time"
        late.cancel()
    (work / "run.log").write_text("\n".join(lines))
    return {
        "command": shlex.join(command[1:]),
        "ended": ended,
        "seconds": time.monotonic() - began,
        "peak_mib": memory.most,
        "log": lines[-150:],
    }


def main() -> None:
    """Make the shape, run the recipe, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a packaged recipe")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--work", type=Path, default=Path("/tmp/whole_run"), help="folder to make")
    parser.add_argument("--steps", type=int, default=4, help="of each stage")
    parser.add_argument("--layers", type=int, help="of the model, where its own are too many")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2), help="two share the weights (FSDP2)")
    parser.add_argument("--commit", default="", help="to record")
    parser.add_argument("--seconds", type=float, default=400, help="for the run")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    arguments = parser.parse_args()
    unwind_when_terminated()
    make_shape(arguments.recipe, arguments.work, arguments.layers, tiny=arguments.tiny)
    recipe = make_recipe(arguments.recipe, arguments.work, arguments.steps, tiny=arguments.tiny)
    found = run(recipe, arguments.work, arguments.seconds, arguments.gpus)
    result = {
        "script": shlex.join(["python", *sys.argv]),
        "recipe": arguments.recipe,
        "layers": arguments.layers,
        "tiny": arguments.tiny,
        "commit": arguments.commit,
        **surroundings(),
        **found,
        "stages": stages(load_recipe(recipe), arguments.work),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "log"}))
    print("\n".join(result["log"]))


if __name__ == "__main__":
    main()
