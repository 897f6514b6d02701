"""Rows of 128K over several GPUs: decoder layers of Qwen3-8B's shape beside one GPU, and Qwen3-0.6B's distillation.

    python benchmarks/training/context_parallel_smoke.py --out smoke.json

Weights and text are random. Stages run as a user starts them, `accelerate launch ... -m sse_convert`, and are killed
once they have made their steps:

    layers-one, layers-two      uptrain (ce), one period of the layers of recipe qwen3-8b at full width, with a small
                                vocabulary, so that layers are what is measured; one GPU, and two with half a row each
    layers-four                 the same on four, with a quarter of a row each
    distill-one, distill-two    distill (kl) of recipe qwen3-0.6b as a whole, likewise; one GPU may not hold it

The JSON is written anew as each part ends. The targets of two are 1.8 times the tokens per second of one GPU and at
most 0.55 of its memory, for the layers. `--tiny` tries the parts of one process on a CPU, where Accelerate has no FSDP.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from fsdp_smoke import (
    FSDP,
    SEVERAL,
    TINY,
    Memory,
    call,
    chosen,
    figures,
    make_teacher,
    make_text,
    surroundings,
    unwind_when_terminated,
    wait,
)

from sse_convert.training.metrics import read

ROW, TINY_ROW = 1 << 17, 256
"""tokens"""
STEPS = 3
"""of each stage, one row each"""
POSITIONS = {"max_position_embeddings": ROW}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "layers": ("qwen3-8b", "uptrain", {"num_hidden_layers": 4, "vocab_size": 8192, "layer_types": None, **POSITIONS}),
    "distill": ("qwen3-0.6b", "distill", POSITIONS),
}
"""what is measured -> recipe, stage, and what its configuration has instead"""
PARTS = ("layers-one", "layers-two", "layers-four", "distill-two", "distill-one")
GPUS = {"one": 1, "two": 2, "four": 4}
"""by the word in a part's name"""
MORE = ("two", "four")


def prepare(shape: str, work: Path, *, tiny: bool) -> Path:
    """Make text, teacher, recipe and converted checkpoint of a shape, unless they are there. Returns the recipe."""
    name, stage_name, changes = SHAPES[shape]
    path = work / "recipe.yaml"
    if path.is_file():
        return path
    tokenizer = make_text(work / "text", 4 if tiny else 20)
    config = json.loads(Path(f"tests/fixtures/configs/{name}.json").read_text()) | changes
    shaped = work / "config.json"
    shaped.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    make_teacher(shaped, work / "teacher", tokenizer, tiny=tiny)
    recipe = yaml.safe_load(Path(f"benchmarks/training/{name}.yaml").read_text())
    row = TINY_ROW if tiny else ROW
    stage = next(stage for stage in recipe["stages"] if stage["name"] == stage_name)
    recipe["stages"] = [{**stage, "seq_len": row, "batch_tokens": row, "tokens": STEPS * row}]
    recipe["model"] = str(work / "teacher")
    recipe["data"] = {"train": [{"path": str(work / "text")}]}
    recipe["calibrate"] = {"enabled": False}
    recipe["eval"] = {"tokens": 0}
    recipe["export"] = {"dir": str(work / "exported")}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(yaml.safe_dump(recipe))
    call([sys.executable, "-m", "sse_convert", "convert", str(unfinished), "-o", str(work / "converted")])
    return unfinished.replace(path)


def run(part: str, work: Path, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Run a part until its steps are logged, or time is up."""
    shape, _, word = part.partition("-")
    recipe = prepare(shape, work / shape, tiny=tiny)
    out, gpus = work / shape / part, GPUS[word]
    launch = ["accelerate.commands.launch", *shlex.split(f"{FSDP} {SEVERAL.format(gpus)}"), "-m"] if gpus > 1 else []
    command = [sys.executable, "-m", *launch, "sse_convert", SHAPES[shape][1], str(recipe)]
    command += ["-c", str(work / shape / "converted"), "-o", str(out)]
    command += ["--set", f"stages.0.context_parallel={gpus}"]
    visible = {} if gpus > 1 or not torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": "0"}
    began, log = time.monotonic(), work / shape / f"{part}.log"
    with Memory() as memory, log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **visible})
        how = wait(process, out, STEPS, began + seconds)
    place = out if out.is_dir() else out.with_name(f"{part}.work")
    records = read(place / "metrics.jsonl")
    print(f"{part}: {how}, {len(records)} steps, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "command": shlex.join(command[1:]),
        "ended": how,
        "chosen": chosen(place),
        "peak_mib": memory.most[:gpus],
        **figures(records, TINY_ROW if tiny else ROW),
        **({} if records and how in ("finished", "killed") else {"log": log.read_text()[-20_000:]}),
    }


def ratios(parts: dict[str, Any], word: str) -> dict[str, Any]:
    """Several GPUs beside one: tokens per second, memory of the fullest, and how far losses are apart."""
    found = {}
    for shape in SHAPES:
        one, more = (parts.get(f"{shape}-{gpus}") for gpus in ("one", word))
        if not (one and more and one["tokens_per_second"] and more["tokens_per_second"]):
            continue
        found[shape] = {
            "tokens_per_second": more["tokens_per_second"] / one["tokens_per_second"],
            "memory": max(more["peak_mib"]) / max(one["peak_mib"]) if one["peak_mib"] else None,
            "losses": max(abs(b / a - 1) for a, b in zip(one["losses"], more["losses"], strict=False)),
        }
    return found


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--work", type=Path, default=Path("/tmp/context_parallel_smoke"), help="folder to make or use")
    fitting = [part for part in PARTS if GPUS[part.partition("-")[2]] <= max(1, torch.cuda.device_count())]
    parser.add_argument("--parts", nargs="*", default=fitting, choices=PARTS, help="default: those with GPUs enough")
    parser.add_argument("--commit", default="", help="to record")
    parser.add_argument("--seconds", type=float, default=900, help="for each part")
    parser.add_argument(
        "--tiny", action="store_true", help=f"a tiny shape {TINY['hidden_size']} wide, to try the script"
    )
    arguments = parser.parse_args()
    unwind_when_terminated()
    result: dict[str, Any] = {"commit": arguments.commit, **surroundings(), "row": ROW}
    result |= {"configs": {shape: changes for shape, (_, _, changes) in SHAPES.items()}, "parts": {}}
    for part in arguments.parts:
        (arguments.work / part.partition("-")[0]).mkdir(parents=True, exist_ok=True)
        result["parts"][part] = run(part, arguments.work, arguments.seconds, tiny=arguments.tiny)
        result |= {f"{word}_beside_one": ratios(result["parts"], word) for word in MORE}
        arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({word: result[f"{word}_beside_one"] for word in MORE}, indent=1))


if __name__ == "__main__":
    main()
