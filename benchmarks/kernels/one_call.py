"""One call of the operator, both ways, in the shape of a trial, for profilers that count what kernels do.

    ncu --clock-control none --profile-from-start off --csv --log-file counters.csv \\
        --section SpeedOfLight --section LaunchStats --section Occupancy --section WarpStateStats \\
        --kernel-name regex:"_kernel" python -m benchmarks.kernels.one_call recipe

Only the call after a first one, which compiles, is between the profiler's start and stop.
"""

import argparse

import torch

from benchmarks.kernels.operator_candidates import problem
from benchmarks.kernels.operator_cases import OURS
from benchmarks.kernels.operator_check import outcome
from benchmarks.kernels.operator_inputs import make
from benchmarks.kernels.tile_trial import SHAPES, case_of


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
