"""Where the GPU's time goes in one training step of a recipe beside this file, and in the plain step beside it.

    python benchmarks/training/step_profile.py qwen3-0.6b --out out/step.json \\
        --config tests/fixtures/configs/qwen3-0.6b.json
    python benchmarks/training/step_profile.py qwen3-0.6b --out out/step.json --parts uptrain \\
        --config tests/fixtures/configs/qwen3-0.6b.json

Folders, parts and passes are those of `throughput.py`, on one GPU. A part runs as a user starts it; torch's profiler
sees the step after the first ones, which compile, and the part ends there. The JSON has milliseconds and launches by
kind of kernel, and all kernels by name. `--tiny` tries the script on a CPU.

By kind of layer, on SmolLM2's shape and real text: `smollm2-heads`, one state beside a window in all but six heads, and
`smollm2-sse`, 16 partitions in 22 layers; of each the windows alone with `--set "layers.pattern=[sliding]"`:

    python benchmarks/training/step_profile.py smollm2-heads --config tests/fixtures/configs/smollm2-135m.json \\
        --tokenizer TEACHER --text TEXT --parts distill --work /tmp/heads --out out/heads.json
"""

import argparse
import json
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from fsdp_smoke import surroundings, unwind_when_terminated
from throughput import WARM, loss_of, parser_of, prepare, run_plain
from torch.optim.optimizer import register_optimizer_step_post_hook

from sse_convert.recipe import load_recipe

KINDS = (
    ("losses", r"divergence_kernel|cross_entropy_kernel"),
    ("softmax and windows", r"flash|fmha|sdpa|flex|attention|_prop"),
    ("delta rule", r"^(correct|inverse)\w*_kernel$"),
    ("SSE", r"^(?!triton_)\w*_kernel$"),
    ("matrix products", r"nvjet|gemm|cutlass|cublas|splitk"),
    ("compiled elementwise", r"^triton_"),
    ("optimizer", r"multi_tensor|foreach|adam"),
    ("elementwise", r"at::"),
    ("copies", r"memcpy|memset"),
)
"""kind of kernel -> what its name has; the first that fits counts. Triton's own kernels are the package's"""
PARTS = ("distill", "uptrain", "plain", "plain-uptrain")
NAME_LENGTH = 120


class Watch:
    """Profiles the optimizer step after the first ones, writes what it saw, and ends the process.

    Args:
        out: JSON to write.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._steps, self._first = out, 0, None
        wanted = torch.profiler.ProfilerActivity
        activities = [wanted.CUDA] if torch.cuda.is_available() else [wanted.CPU]
        self._profiler = torch.profiler.profile(activities=activities)

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """After each step of each optimizer; Muon has another one beside it, whose steps are the same."""
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        self._steps += 1
        if self._steps == WARM:
            _wait()
            self._began = time.monotonic()
            self._profiler.start()
        if self._steps == WARM + 1:
            _wait()
            seconds = time.monotonic() - self._began
            self._profiler.stop()
            self._out.write_text(json.dumps(summary(self._profiler.key_averages(), seconds)))
            raise SystemExit(0)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(events: Any, seconds: float) -> dict[str, Any]:
    """Milliseconds and launches by kind of kernel, and all kernels, the slowest first."""
    cuda = torch.cuda.is_available()
    own = [event for event in events if not getattr(event, "is_user_annotation", False)]
    found = [(e.key, e.count, (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e3) for e in own]
    milliseconds, launches = Counter[str](), Counter[str]()
    for name, count, spent in found:
        milliseconds[kind(name)] += spent
        launches[kind(name)] += count
    slowest = sorted(found, key=lambda row: -row[2])
    return {
        "step_ms": seconds * 1e3,
        "busy_ms": sum(milliseconds.values()),
        "kinds": {name: {"ms": spent, "launches": launches[name]} for name, spent in milliseconds.most_common()},
        "kernels": [{"name": name[:NAME_LENGTH], "launches": count, "ms": spent} for name, count, spent in slowest],
    }


def kind(name: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def watched(part: str, path: Path, arguments: argparse.Namespace) -> None:
    """Run a part in this process until its step was seen."""
    register_optimizer_step_post_hook(Watch(arguments.out))
    if part.startswith("plain"):
        run_plain(load_recipe(path), loss_of(part), arguments.rows[0], WARM + 1)
        return
    work = arguments.work
    sys.argv = ["sse_convert", part, str(path), "-c", str(work / "converted"), "-o", str(work / f"{part}-profile")]
    runpy.run_module("sse_convert", run_name="__main__")


def parser() -> argparse.ArgumentParser:
    p = parser_of(__doc__)
    p.add_argument("--out", type=Path, required=True, help="JSON to write")
    p.add_argument("--parts", nargs="*", default=["distill", "plain"], choices=PARTS)
    p.add_argument("--rows", type=int, nargs="*", default=[8], help="of a pass of the plain step")
    p.add_argument("--seconds", type=float, default=240, help="for each part")
    p.add_argument("--watched", choices=PARTS, help=argparse.SUPPRESS)
    return p


def main() -> None:
    """Each part in a process of its own."""
    arguments = parser().parse_args()
    unwind_when_terminated()
    path = arguments.work / "recipe.yaml"
    if arguments.watched:
        watched(arguments.watched, path, arguments)
        return
    prepare(arguments, path)
    result = {"command": shlex.join(["python", *sys.argv]), "commit": arguments.commit, **surroundings(), "parts": {}}
    for part in arguments.parts:
        seen = arguments.work / f"{part}-profile.json"
        command = [sys.executable, __file__, arguments.recipe, "--work", str(arguments.work), "--out", str(seen)]
        command += ["--watched", part, "--rows", *map(str, arguments.rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=arguments.seconds)
        result["parts"][part] = json.loads(seen.read_text()) if seen.is_file() else {"log": done.stderr[-2000:]}
        arguments.out.write_text(json.dumps(result, indent=1))
        print(part, json.dumps(result["parts"][part].get("kinds", result["parts"][part])), flush=True)


if __name__ == "__main__":
    main()
