"""One call of the operator, both ways, in the shape of a trial, for profilers that count what kernels do.

    ncu --clock-control none --profile-from-start off --csv --log-file counters.csv \\
        --section SpeedOfLight --section LaunchStats --section Occupancy --section WarpStateStats \\
        --kernel-name regex:"_kernel" python -m benchmarks.kernels.one_call recipe

Only the call after a first one, which compiles, is between the profiler's start and stop.
"""

import argparse
from typing import Any

import torch

from benchmarks.kernels.operator_candidates import problem
from benchmarks.kernels.operator_cases import OURS, Case
from benchmarks.kernels.operator_check import outcome
from benchmarks.kernels.operator_inputs import make

PAIR: dict[str, Any] = {"query_heads": 16, "normalizer": 16.0}
SHAPES: dict[str, dict[str, Any]] = {
    "paper": {**PAIR, "k_map": "softmax"},
    "recipe": {**PAIR, "k_map": "relu", "partitions": 16, "top_k": 2},
    "figure": {},
    "delta": {"delta": True},
    "recommended": {"delta": True, "heads": 16, "query_heads": 16, "partitions": 60, "top_k": 4, "normalizer": 16.0},
    "small gla": {"heads": 8, "dim": 64, "partitions": 60, "top_k": 4},
    "small delta": {"heads": 8, "dim": 64, "partitions": 60, "top_k": 4, "delta": True},
}
"""eight state heads of 128 channels, N = 4, k = 1, two sequences unless a shape says otherwise"""


def case_of(shape: str, lengths: tuple[int, ...]) -> Case:
    settings = {"partitions": 4, "top_k": 1, **SHAPES[shape]}
    return Case(group="trial", lengths=lengths, candidates=(OURS,), note=shape, **settings)


def main() -> None:
    """Warm up, then one call that is profiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=2**15, help="in two sequences")
    options = parser.parse_args()
    case = case_of(options.shape, (options.tokens // 2,) * 2)
    call = problem(OURS, make(case, torch.device("cuda")))
    outcome(call, backward=True)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    outcome(call, backward=True)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
