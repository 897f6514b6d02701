"""Peak memory and time of convert, verify and export on a checkpoint of real size, and of a plan of 405 billion
parameters, each in a process of its own.

    python -m benchmarks.checkpoints.memory --out benchmarks/checkpoints/memory.json

Makes a random checkpoint from a config in a temporary folder (--folder says where), and removes it all afterwards.
"""

import argparse
import dataclasses as dc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch
import yaml

from benchmarks.kernels.hybrid_measure import commit
from sse_convert.checkpoints.output_folder import check_space
from sse_convert.checkpoints.safetensors_io import Layout, write_shard
from sse_convert.checkpoints.tensor_data import CHUNK_BYTES, tensor_bytes
from sse_convert.cli.runner import reporting_errors
from sse_convert.files import write_json
from sse_convert.surgery.convert import layout_bytes, write_index
from tests.model_configs import config_path, model_config
from tests.surgery.synthetic import checkpoint, llama_layout

GB = 1e9
CONFIG, LARGEST = config_path("llama-3.2-3b"), "llama-3.1-405b"
SHARD_BYTES = 2e9
LARGE = {
    "num_partitions": 60,
    "top_k": 4,
    "qk_rank": 64,
    "advanced": {"shared_partition": True, "decay_params": "separate", "balance": "aux_loss"},
}
"""many new tensors"""
_CHILD = """
import re, sys
from sse_convert.cli.app import main
try:
    main()
except SystemExit as end:
    code = end.code
status = open("/proc/self/status").read()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024, file=sys.stderr)
sys.exit(code)
"""


@dc.dataclass(frozen=True)
class Cost:
    """What a command took."""

    peak_rss_gb: float
    """resident memory: VmHWM, which starts anew with a program (ru_maxrss begins with what the parent had)"""
    seconds: float
    """on the clock, with whatever else the machine did"""
    cpu_seconds: float
    """user and system time of the process"""


def measured(*arguments: str | Path) -> tuple[dict[str, Any], Cost]:
    """Run a command in a process of its own: its result and what it took."""
    start, before = time.monotonic(), getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    seconds, after = time.monotonic() - start, getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = int(done.stderr.splitlines()[-1]) / GB
    return json.loads(done.stdout)["result"], Cost(round(peak, 3), round(seconds, 1), round(cpu, 1))


def random_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of random bfloat16 weights in shards; bytes of its tensors."""
    layout = llama_layout(config)
    shards: list[Layout] = [{}]
    for name, entry in layout.items():
        if shards[-1] and layout_bytes({**shards[-1], name: entry}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = entry
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / name, shard, _random_pieces(shard))
    write_index(folder, names)
    return layout_bytes(layout)


def _random_pieces(layout: Layout) -> Iterator[tuple[str, bytes]]:
    noise = tensor_bytes((torch.randn(CHUNK_BYTES // 2) * 0.02).bfloat16())
    for name, entry in layout.items():
        left = layout_bytes({name: entry})
        while left:
            yield name, noise[:left]
            left -= min(left, len(noise))


def measure(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Make the checkpoint, run the commands, and tell what they took."""
    size = layout_bytes(llama_layout(config))
    check_space(folder, 4 * size)
    random_checkpoint(folder / "teacher", config)
    recipe, largest = _recipe(folder, "teacher"), _recipe(folder, "largest")
    checkpoint(folder / "largest", model_config(LARGEST), shards=191)
    commands = {
        "plan of 405B": ("plan", largest),
        "convert": ("convert", recipe, "-o", folder / "converted"),
        "verify": ("verify", folder / "converted"),
        "export": ("export", recipe, "-c", folder / "converted", "-o", folder / "exported"),
    }
    found = {}
    for name, arguments in commands.items():
        found[name] = dc.asdict(measured(*arguments)[1])
        print(name, found[name], file=sys.stderr, flush=True)
    return {"checkpoint_gb": round(size / GB, 3), "commands": found}


def _recipe(folder: Path, teacher: str) -> Path:
    data = {
        "recipe_version": 1,
        "model": str(folder / teacher),
        "layers": {"pattern": ["sse+sliding", "sliding", "full"], "keep": [0, -1]},
        "mixers": {"sse+sliding": LARGE},
        "export": {"dir": str(folder / "exported")},
    }
    path = folder / f"{teacher}.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def conditions(script: str = "memory") -> dict[str, Any]:
    """What the figures come from."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name"))
    return {
        "command": " ".join(["python", "-m", f"benchmarks.checkpoints.{script}", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} x {cpu.partition(':')[2].strip()}",
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@reporting_errors
def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of a Llama")
    parser.add_argument("--layers", type=int, default=24, help="layers of the checkpoint (24: 5.6 GB)")
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint; unset takes the system's")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    asked = parser.parse_args()
    config = {**json.loads(asked.config.read_text("utf-8")), "num_hidden_layers": asked.layers}
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        write_json(asked.out, {**conditions(), **measure(folder / "made", config)})
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
