"""One decoding step on a CPU, of a teacher beside its hybrid: both in turn, in one process, with the same threads.

    sse-convert convert demo/recipe.yaml -o out/demo-hybrid
    python -m benchmarks.kernels.cpu_decode demo/teacher out/demo-hybrid --out benchmarks/kernels/cpu_decode_demo.json

A figure is the median over turns of the mean step of a turn, in float32, through `graphed` as `generate` runs.
What a step costs does not depend on what the new tensors were trained to.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.torch_backends import environment
from sse_convert.checkpoints.load_model import load_model
from sse_convert.files import write_json
from sse_convert.inference.cuda_graphs import graphed

STEPS = 8
"""of a turn"""


def steps(model: Any, ids: torch.Tensor, cache: Any) -> float:
    """Milliseconds of processor time of a step, the mean of those of a turn [1, STEPS] over the cache."""
    with graphed(model, slots=cache.get_seq_length() + STEPS):
        start = time.process_time()
        for column in range(STEPS):
            model(input_ids=ids[:, column : column + 1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return 1e3 * (time.process_time() - start) / STEPS


@torch.no_grad()
def measure(models: dict[str, Any], length: int, turns: int) -> dict[str, float]:
    """Median milliseconds of a step of each model after `length` tokens."""
    ids = torch.randint(models["teacher"].config.vocab_size, (1, length + (turns + 1) * STEPS))
    caches = {
        n: m(input_ids=ids[:, :length], use_cache=True, logits_to_keep=1).past_key_values for n, m in models.items()
    }
    took: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(turns + 1):
        first = length + turn * STEPS
        for name, model in models.items():
            took[name].append(steps(model, ids[:, first : first + STEPS], caches[name]))
    return {f"{name}_ms": round(statistics.median(each[1:]), 3) for name, each in took.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("hybrid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8192], help="tokens before the steps"
    )
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: load_model(getattr(options, name), device="cpu").float().eval() for name in ("teacher", "hybrid")}
    rows = []
    for length in options.lengths:
        row: dict[str, Any] = {"length": length, "threads": 1, **measure(models, length, options.turns)}
        row["hybrid_is_faster_by"] = round(row["teacher_ms"] / row["hybrid_ms"], 3)
        rows.append(row)
        print(row, file=sys.stderr)
    command = " ".join(["python -m benchmarks.kernels.cpu_decode", *sys.argv[1:]])
    surroundings = {**environment(torch.device("cpu")), "command": command}
    write_json(options.out, {"schema": 1, "environment": surroundings, "results": rows})


if __name__ == "__main__":
    main()
