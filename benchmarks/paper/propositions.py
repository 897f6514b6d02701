"""Propositions 1 to 4 of the paper's Appendix A on random instances, as stated and as their proofs need them.

    python -m benchmarks.paper.propositions --out benchmarks/paper/propositions.json

Some statements are expected to break: they leave out a condition that the proof uses. Exits with 6 if a statement that
should hold breaks, or one that should break holds.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.paper.row_sparse.propositions import DIMS, Check, check_all
from sse_convert.cli.runner import reporting_errors
from sse_convert.console import say
from sse_convert.errors import VerificationError
from sse_convert.files import write_json


def line(check: Check) -> str:
    found = "holds" if check.violations == 0 else f"breaks in {check.violations / check.instances:.1%}"
    surprise = "" if check.confirmed else "  UNEXPECTED"
    return f"{check.proposition}  {found:16} of {check.instances:7,}  {check.statement}{surprise}"


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="JSON file to write")
    p.add_argument("--instances", type=int, default=20_000, help="drawn per dim")
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(arguments)
    checks = check_all(options.instances, options.seed)
    say("\n".join(line(check) for check in checks))
    report = {
        "schema": 1, "environment": environment(torch.device("cpu")), "instances_per_dim": options.instances,
        "dims": DIMS, "seed": options.seed, "checks": checks,
    }  # fmt: skip
    if options.out is not None:
        write_json(options.out, report)
    if surprises := sum(not check.confirmed for check in checks):
        raise VerificationError(f"{surprises} statements came out otherwise", expected="as marked in the list")


if __name__ == "__main__":
    sys.exit(main())
