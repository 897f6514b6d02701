"""Another checkout's operator beside today's, and today's under other tiles: errors, times, and where they go.

    git worktree add /tmp/before dc304b1
    python -m benchmarks.kernels.tile_trial /tmp/before --out tile_trial.json

Kernels are compiled by a process for each shape at first. Errors are against float64, at 8k tokens; what is wrong is
not timed. Times are medians over alternations of CUDA graphs, in ms. The JSON is written as it grows.
"""

import argparse
import dataclasses as dc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.before_after import ALTERNATIONS, milliseconds
from benchmarks.kernels.hybrid_measure import environment
from benchmarks.kernels.operator_candidates import Problem, problem
from benchmarks.kernels.operator_cases import OURS, Case
from benchmarks.kernels.operator_check import WRONG, Exact, outcome
from benchmarks.kernels.operator_inputs import make
from benchmarks.kernels.operator_measure import clock, extra_memory, launches

MIB = 2**20
CHECKED = 2**13
COMPILED = 2**13
"""tokens in the runs that compile"""
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
ROWS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("paper", (2**14,) * 2), ("figure", (2**15,) * 2), ("delta", (2**15,) * 2), ("recipe", (2**14,) * 2),
    ("figure", (2**12,) * 2), ("figure", (2**9,) * 2), ("recommended", (2**14,) * 2), ("small gla", (2**11,) * 8),
    ("small delta", (2**11,) * 8), ("small gla", (2**13,) * 2), ("small delta", (2**13,) * 2), ("figure", (2**17,) * 2),
)  # fmt: skip
"""what is timed, the most wanted first"""
TILES: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "scan, 12 stages": (("figure", "paper", "recipe"), {"scan": {"stages": 12}}),
    "values, 8 warps": (("figure", "paper", "recipe", "delta"), {"values": {"warps": 8}}),
    "output, 8 warps": (("figure", "delta"), {"output": {"warps": 8}}),
    "output, 8 warps, 3 stages": (("figure", "delta"), {"output": {"warps": 8, "stages": 3}}),
    "prepare, 32 channels": (("paper", "recipe"), {"prepare": {"block_d": 32}}),
    "walk, 3 stages": (("delta", "recommended"), {"correct": {"stages": 3}}),
    "walk, 64 values": (("delta", "recommended"), {"correct": {"block_v": 64}}),
}
"""of which shapes, and what changes in which launches of `config_for`"""
COMPILE_SECONDS = 80.0
"""after which compiling processes are ended"""
Operator = Callable[..., Any]
Row = dict[str, Any]


def package(checkout: Path | None, folder: Path) -> str:
    """Name under which the package of a checkout is imported: a copy in `folder`, or our own."""
    if checkout is None:
        return "sse_convert"
    copy = folder / "sse_before"
    if not copy.exists():
        shutil.copytree(checkout / "sse_convert", copy)
        for path in copy.rglob("*.py"):
            path.write_text(path.read_text(encoding="utf-8").replace("sse_convert", "sse_before"), encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return "sse_before"


def operator_of(name: str) -> Operator:
    """`sse_attention` of a package, without the self-check: everything here is compared with float64 instead."""
    dispatch = importlib.import_module(f"{name}.kernels.dispatch")
    backend = importlib.import_module(f"{name}.kernels.triton_backend")
    for module in (dispatch, backend):
        module.unavailable_reason = lambda *_, **__: None  # type: ignore[attr-defined]
    found: Operator = dispatch.sse_attention
    return found


@contextmanager
def tiles(changes: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Other launches of some kernels for our own package."""
    from sse_convert.kernels.triton import problem as module

    pinned = module.config_for

    def config_for(*sizes: Any) -> Any:
        config = pinned(*sizes)
        return dc.replace(config, **{name: dc.replace(getattr(config, name), **new) for name, new in changes.items()})

    module.config_for = config_for  # type: ignore[assignment]
    try:
        yield
    finally:
        module.config_for = pinned


def case_of(shape: str, lengths: tuple[int, ...]) -> Case:
    settings = {"partitions": 4, "top_k": 1, **SHAPES[shape]}
    return Case(group="trial", lengths=lengths, candidates=(OURS,), note=shape, **settings)


def run_of(operator: Operator, case: Case, leaves: dict[str, Tensor], cu_seqlens: Tensor) -> Tensor:
    """o of one call."""
    t = leaves
    found: Tensor = operator(
        t["q"], t["k"], t["v"], t["log_decay"], t["router_logits"],
        (t["shared q"], t["shared k"], t["shared log_decay"]), top_k=case.top_k, k_map=case.k_map,
        decay_normalizer=case.normalizer, write_strength=t.get("write_strength"), cu_seqlens=cu_seqlens,
        max_seqlen=max(case.lengths), backend="triton",
    )[0]  # fmt: skip
    return found


def candidates(shape: str, operators: dict[str, Operator]) -> dict[str, tuple[Operator, dict[str, dict[str, Any]]]]:
    """By name, whose operator under which tiles; the pinned ones first."""
    found: dict[str, tuple[Operator, dict[str, dict[str, Any]]]] = {name: (f, {}) for name, f in operators.items()}
    if "after" not in operators:
        return found
    after = operators["after"]
    return found | {name: (after, changes) for name, (shapes, changes) in TILES.items() if shape in shapes}


def graph_of(run: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
    """A captured call, in memory that the graphs of a row share."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph.capture_begin(pool=pool)
        results = run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    del results
    return graph


class Trial:
    """The report as it grows."""

    def __init__(self, out: Path, operators: dict[str, Operator], seconds: float) -> None:
        self.out, self.operators, self.until = out, operators, time.monotonic() + seconds
        self.report: Row = {"environment": environment(torch.device("cuda")), "errors": {}, "rows": []}
        self.wrong: set[tuple[str, str]] = set()
        self.pool: Any = None

    def late(self) -> bool:
        return time.monotonic() > self.until

    def save(self) -> None:
        self.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def check(self, shape: str) -> None:
        """Relative errors of every candidate at 8k tokens."""
        case = case_of(shape, (CHECKED // 2,) * 2)
        x, exact, errors = make(case, torch.device("cuda")), Exact(case), self.report["errors"].setdefault(shape, {})
        known = problem(OURS, x)
        for name, (operator, changes) in candidates(shape, self.operators).items():
            run = partial(run_of, operator, case, x.leaves, x.cu_seqlens)
            try:
                with tiles(changes):
                    errors[name] = exact.errors(dc.replace(known, run=run))
                if not all(error <= WRONG for error in errors[name].values()):
                    self.wrong.add((shape, name))
            except Exception as problem_found:
                errors[name] = f"{type(problem_found).__name__}: {problem_found}".splitlines()[0]
                self.wrong.add((shape, name))
            print(shape, name, errors[name], flush=True)
            self.save()

    def time(self, shape: str, lengths: tuple[int, ...]) -> None:
        """Times of every candidate of one row, alternating; kernels by name; memory."""
        case, self.pool = case_of(shape, lengths), torch.cuda.graph_pool_handle()
        x = make(case, torch.device("cuda"))
        known, runs, row = problem(OURS, x), {}, {"shape": shape, "tokens": case.tokens, "rows": len(lengths), "ms": {}}
        self.report["rows"].append(row)
        for name, (operator, changes) in candidates(shape, self.operators).items():
            if (shape, name) in self.wrong:
                continue
            p = dc.replace(known, run=partial(run_of, operator, case, x.leaves, x.cu_seqlens))
            try:
                with tiles(changes):
                    runs[name] = self._graphs(p, row, name)
            except Exception as problem_found:
                row["ms"][name] = f"{type(problem_found).__name__}: {problem_found}".splitlines()[0]
        times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in runs}
        for _ in range(ALTERNATIONS):
            for name, graphs in runs.items():
                for way, graph in graphs.items():
                    times[name][way].append(milliseconds(graph.replay))
        for name, found in times.items():
            row["ms"][name] = {way: round(statistics.median(ms), 4) for way, ms in found.items()}
        print(shape, case.tokens, json.dumps(row["ms"]), flush=True)
        self.save()
        del runs
        torch.cuda.empty_cache()

    def _graphs(self, p: Problem, row: Row, name: str) -> dict[str, torch.cuda.CUDAGraph]:
        forward, both = (partial(outcome, p, backward=way) for way in (False, True))
        both()
        row.setdefault("kernels_us", {})[name] = launches(both)["kernels_us"]
        if name in self.operators:
            row.setdefault("extra_mib", {})[name] = [round(extra_memory(run) / MIB, 1) for run in (forward, both)]
            if row["tokens"] <= CHECKED:
                row.setdefault("eager_ms", {})[name] = [clock(run)["ms"] for run in (forward, both)]
        return {"forward": graph_of(forward, self.pool), "both": graph_of(both, self.pool)}


def compile_shape(shape: str, operators: dict[str, Operator]) -> None:
    """Run every candidate of a shape once, so that later processes find its kernels in Triton's cache."""
    case = case_of(shape, (COMPILED // 2,) * 2)
    x = make(case, torch.device("cuda"))
    known = problem(OURS, x)
    for name, (operator, changes) in candidates(shape, operators).items():
        p = dc.replace(known, run=partial(run_of, operator, case, x.leaves, x.cu_seqlens))
        try:
            with tiles(changes):
                outcome(p, backward=True)
        except Exception as problem_found:
            print(shape, name, type(problem_found).__name__, str(problem_found)[:200], flush=True)
    torch.cuda.synchronize()


def operators_of(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Operator]:
    """`before` and `after`, or one of them."""
    checkouts = {"before": options.checkout, "after": None}
    return {name: operator_of(package(checkouts[name], options.folder)) for name in names}


def compile_all(options: argparse.Namespace) -> None:
    """A process for each shape and checkout; those that take too long are ended."""
    command = [sys.executable, "-m", "benchmarks.kernels.tile_trial", str(options.checkout), "--out", str(options.out)]
    package(options.checkout, options.folder)
    environment_of = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [(shape, whose) for shape in options.shapes for whose in ("after", "before")]
    until = time.monotonic() + COMPILE_SECONDS
    workers = [
        subprocess.Popen([*command, "--folder", str(options.folder), "--compile", *job], env=environment_of)
        for job in jobs
    ]
    for worker, job in zip(workers, jobs, strict=True):
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            print("compiling took too long:", *job, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the earlier commit")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tile_trial"), help="for the earlier package")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=190.0, help="after which no row is begun")
    parser.add_argument("--compile", nargs=2, metavar=("SHAPE", "WHOSE"), help="compile only")
    return parser.parse_args()


def main() -> None:
    """Compile, check, measure."""
    options, started = parse(), time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.compile:
        shape, whose = options.compile
        compile_shape(shape, operators_of(options, (whose,)))
        return
    compile_all(options)
    trial = Trial(options.out, operators_of(options, ("before", "after")), options.seconds)
    trial.until = started + options.seconds
    trial.report["compiled_s"] = round(time.monotonic() - started, 1)
    checked = set()
    for shape, lengths in ROWS:
        if shape not in options.shapes or trial.late():
            continue
        if shape not in checked:
            trial.check(shape)
            checked.add(shape)
        trial.time(shape, lengths)
    trial.report["seconds"] = round(time.monotonic() - started, 1)
    trial.save()
    print(table(trial.report["rows"]))


def table(rows: list[Row]) -> str:
    """Milliseconds forward / both ways of each row, by candidate, and of kernels whose times changed, in us."""
    lines = []
    for row in rows:
        lines.append(f"{row['shape']}, {row['tokens']} tokens in {row['rows']}; extra MiB {row.get('extra_mib')}")
        lines += [f"  {name:40} " + (f"{ms['forward']:8.3f} {ms['both']:8.3f}" if isinstance(ms, dict) else str(ms))
                  for name, ms in row["ms"].items()]  # fmt: skip
        lines += [f"  eager: {name} {ms[0]:.3f} {ms[1]:.3f}" for name, ms in row.get("eager_ms", {}).items()]
        kernels = row.get("kernels_us", {})
        before, after = (kernels.get(name, {}) for name in ("before", "after"))
        lines += [f"    {name[:60]:60} {before.get(name, 0.0):8.1f} {us:8.1f}" for name, us in after.items()
                  if abs(us - before.get(name, 0.0)) > 0.01 * us]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
