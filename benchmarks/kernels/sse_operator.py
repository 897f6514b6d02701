"""The SSE operator against its peers on one GPU, in one run.

    python -m benchmarks.kernels.sse_operator --out benchmarks/kernels/operator_h200.json

Peers: torch's softmax attention (flash, cuDNN), fla-core's `chunk_gla` on the same tokens and on as many slots as SSE
has, under the delta rule its `chunk_kda` and `chunk_gated_delta_rule` and FlashQLA, and SSE composed of such functions
as its authors published it and over the delta rule. Every candidate is compared with float64 before it is timed; one
that is wrong is reported as wrong and not timed. Everything runs eagerly and, where it does not wait for the device, as
a CUDA graph. The JSON is rewritten after every candidate; --resume goes on with an unfinished
one, in which each cell names its commit and `earlier` keeps the surroundings of the runs before. COMMIT names the
commit where the checkout has no git.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import operator_decode
from benchmarks.kernels.hybrid_measure import environment, release
from benchmarks.kernels.operator_candidates import Problem, problem
from benchmarks.kernels.operator_cases import CANDIDATES, CUDNN, FLASH, GROUPS, OURS, RECURRENT, SECONDS, Case
from benchmarks.kernels.operator_check import WRONG, Exact, outcome
from benchmarks.kernels.operator_inputs import Inputs, make
from benchmarks.kernels.operator_measure import copy_bandwidth, figures
from sse_convert.cli.runner import reporting_errors
from sse_convert.errors import HardwareError
from sse_convert.files import write_json

LONGEST_MS = 3000.0
"""a call predicted to take longer is not run"""
NO_TIME = "not run: the time of the group is spent"
Row = dict[str, Any]


class NotTimedError(Exception):
    """Why a candidate is not timed."""


class Benchmark:
    """The report as it grows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.wanted: list[str] = options.candidates
        self.notes: list[str] | None = options.notes
        self.device = torch.device("cuda")
        self.report: Row = {"schema": 1, "cells": []}
        if options.resume and self.out.is_file():
            self.report = continued(json.loads(self.out.read_text(encoding="utf-8")))
        resumed = bool(self.report["cells"])
        self.report |= {"environment": surroundings(self.device) | {"resumed": resumed}, "wrong_beyond": WRONG}
        self.commit: str = self.report["environment"]["commit"]
        self.bytes_per_ms: float = self.report["environment"]["copy_tb_per_s"] * 1e9
        self.known = {identity(cell) for cell in self.report["cells"]}

    def group(self, name: str, tokens: list[int] | None) -> None:
        """All cases of a group, until its time is spent."""
        started = time.monotonic()
        measure = self._decode if name == "decode" else self._attention
        for case in GROUPS[name]():
            candidates = [c for c in case.candidates if c in self.wanted and identity(case.key(), c) not in self.known]
            if not candidates or (tokens is not None and case.tokens not in tokens):
                continue
            if self.notes is not None and case.note not in self.notes:
                continue
            late = time.monotonic() - started > SECONDS[name]
            for candidate in candidates if late else ():
                self._add({**case.key(), "candidate": candidate, "error": NO_TIME})
            if not late:
                measure(case, candidates)
                release(self.device)
        self.report.setdefault("seconds", {})[name] = round(time.monotonic() - started, 1)
        self._save()

    def _attention(self, case: Case, candidates: list[str]) -> None:
        x, exact = make(case, self.device), Exact(case)
        for candidate in candidates:
            self._attempt(case, candidate, partial(self._forward_and_backward, x=x, exact=exact))

    def _forward_and_backward(self, row: Row, x: Inputs, exact: Exact) -> None:
        self._refuse_slow(row)
        p = problem(row["candidate"], x)
        row["errors"] = exact.errors(p)
        refuse_wrong(row["errors"])
        for name, backward in (("forward", False), ("forward_backward", True)):
            if backward <= x.case.backward:
                row[name] = figures(partial(outcome, p, backward=backward), profiled=x.case.profiled)
                if row["candidate"] not in (FLASH, CUDNN):
                    row[name]["floor_ms"] = round(floor_bytes(p, backward=backward) / self.bytes_per_ms, 5)

    def _decode(self, case: Case, candidates: list[str]) -> None:
        x = make(case, self.device)
        for candidate in candidates:
            self._attempt(case, candidate, partial(self._step, x=x))

    def _step(self, row: Row, x: Inputs) -> None:
        step = operator_decode.step(row["candidate"], x)
        row["errors"] = step.errors()
        refuse_wrong(row["errors"])
        row["forward"] = figures(step.once, profiled=True)
        row["forward"]["floor_ms"] = round(operator_decode.floor_bytes(x) / self.bytes_per_ms, 5)

    def _attempt(self, case: Case, candidate: str, measure: Callable[[Row], None]) -> None:
        """Add a cell; one that fails says why, and the others go on, unless the device is lost."""
        row: Row = {**case.key(), "candidate": candidate}
        started, lost = time.monotonic(), False
        try:
            measure(row)
        except NotTimedError as problem:
            row["error"] = str(problem)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        except Exception as problem:
            traceback.print_exc()
            row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            lost = not device_answers()
        row["seconds"] = round(time.monotonic() - started, 2)
        self._add(row)
        if lost:
            sys.exit("the device does not answer any more; --resume goes on with what is left")

    def _refuse_slow(self, row: Row) -> None:
        """Raise if a call would take too long, judging by shorter ones; softmax attention grows with the square."""
        power = 2 if row["candidate"] in (FLASH, CUDNN) else 1
        slowest = "forward_backward" if row["backward"] else "forward"
        like = [c for c in self.report["cells"] if slowest in c and c["tokens"] < row["tokens"] and
                all(c[key] == row[key] for key in ("candidate", "group", "partitions", "top_k", "note"))]  # fmt: skip
        if like:
            nearest = max(like, key=lambda cell: cell["tokens"])
            predicted = nearest[slowest]["eager"]["ms"] * (row["tokens"] / nearest["tokens"]) ** power
            if predicted > LONGEST_MS:
                raise NotTimedError(f"not run: a call would take about {predicted / 1e3:.1f} s")

    def _add(self, row: Row) -> None:
        self.report["cells"].append({**row, "commit": self.commit})
        print(summary(row), file=sys.stderr, flush=True)
        self._save()

    def _save(self) -> None:
        write_json(self.out, self.report)


def continued(report: Row) -> Row:
    """The report of an unfinished run, to go on with: each cell with its commit, and the surroundings so far."""
    before = report["environment"]
    cells = [{"commit": before["commit"], **cell} for cell in report["cells"] if cell.get("error") != NO_TIME]
    return {**report, "cells": cells, "earlier": [*report.get("earlier", []), before]}


def identity(cell: Row, candidate: str | None = None) -> str:
    """Equal for the same candidate on the same case."""
    case = {
        name: cell.get(name, default) for name, default in Case(group="", lengths=(1,), candidates=()).key().items()
    }
    return json.dumps([case, candidate or cell["candidate"]])


def refuse_wrong(errors: dict[str, float] | None) -> None:
    """Raise if any error is too large."""
    wrong = [f"{name} {error:.1e}" for name, error in (errors or {}).items() if not error <= WRONG]
    if wrong:
        raise NotTimedError(f"wrong, not timed: relative errors {', '.join(wrong)}, allowed {WRONG:.0e}")


def floor_bytes(p: Problem, *, backward: bool) -> int:
    """Everything read and written once: leaves and o; again the leaves with d_o and their gradients for a backward."""
    leaves, o = sum(x.nbytes for x in p.leaves.values()), p.d_o.nbytes
    return leaves + o + (2 * leaves + o if backward else 0)


def device_answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def surroundings(device: torch.device) -> Row:
    """What a reader needs to make the figures again, and the measured speed of a large copy."""
    from triton.knobs import nvidia

    own = {
        "command": " ".join(["python -m benchmarks.kernels.sse_operator", *sys.argv[1:]]),
        "fla_core": metadata.version("fla-core") if find_spec("fla") else None,
        "flash_qla": metadata.version("flash-qla") if find_spec("flash_qla") else None,
        "ptxas": nvidia.ptxas.version,
        "copy_tb_per_s": round(copy_bandwidth() / 1e12, 3),
    }
    return environment(device) | own


def summary(row: Row) -> str:
    """One line of progress."""
    case = f"{row['group']} {row['tokens']} N={row['partitions']} K={row['top_k']} {row['note']} {row['candidate']}"
    times = [
        f"{name} {row[name]['eager']['ms']:.3f} ms"
        + (f", graph {row[name]['graph']['ms']:.3f}" if isinstance(row[name]["graph"], dict) else "")
        for name in ("forward", "forward_backward") if name in row
    ]  # fmt: skip
    errors = row.get("errors") or {}
    worst = [f"error {max(errors.values()):.1e}"] if errors else []
    return ": ".join([case, "; ".join([*times, *worst, *([row["error"]] if "error" in row else [])])])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--out", type=Path, help="JSON file to write")
    output.add_argument("--list", action="store_true", help="print the cells and stop; needs no GPU")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS, metavar="GROUP",
                        help=f"of {', '.join(GROUPS)}; default: all")  # fmt: skip
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES, metavar="CANDIDATE",
                        help=f"of {', '.join(CANDIDATES)}; default: all")  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", help="only cases of so many tokens in all")
    parser.add_argument("--notes", nargs="+", help="only cases with these notes, as --list shows them")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the JSON has, measure the others")
    return parser.parse_args(arguments)


def listing(options: argparse.Namespace) -> str:
    """One line per cell."""
    lines = [
        f"{case.group}: {case.tokens} tokens in {len(case.lengths)}, N={case.partitions} K={case.top_k} "
        f"heads={case.query_heads}/{case.heads}x{case.dim} {case.note}: {candidate}"
        for group in options.groups for case in GROUPS[group]() for candidate in case.candidates
        if candidate in options.candidates and (options.tokens is None or case.tokens in options.tokens)
        and (options.notes is None or case.note in options.notes)
    ]  # fmt: skip
    return "\n".join([*lines, f"{len(lines)} cells"])


def require_gpu(candidates: list[str]) -> None:
    """Refuse to run without what the candidates need.

    Raises:
        HardwareError: no GPU, or no peers.
    """
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device", expected="one of compute capability 8.0 or later", fix="use --list here")
    if find_spec("fla") is None and not set(candidates) <= {OURS, FLASH, CUDNN, RECURRENT}:
        raise HardwareError("fla-core is missing", expected="the peers", fix="pip install fla-core==0.6.0")


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    """Measure the groups, one after the other."""
    options = parse(arguments)
    if options.list:
        print(listing(options))
        return
    require_gpu(options.candidates)
    benchmark = Benchmark(options)
    for name in options.groups:
        benchmark.group(name, options.tokens)


if __name__ == "__main__":
    sys.exit(main())
