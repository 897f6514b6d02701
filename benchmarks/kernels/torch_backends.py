"""Time of the torch backend of the SSE operator by chunk size, forward and forward + backward.

Run from the checkout, on a machine with nothing else to do:

    python benchmarks/kernels/torch_backends.py --out benchmarks/kernels/torch_backends_cpu.json

It is first compared with the reference on a short case; nothing is timed if it is wrong.
"""

import argparse
import dataclasses as dc
import functools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.files import write_json
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.torch import chunk as chunked
from sse_convert.kernels.torch.chunk import gated_linear_attention
from sse_convert.kernels.torch.operands import operands_of
from sse_convert.kernels.torch.varlen import sse_attention_varlen
from sse_convert.kernels.validation import build_inputs

TOLERANCE = 2e-6


@dc.dataclass(frozen=True, kw_only=True)
class Problem:
    tokens: int
    heads: int
    dim: int
    num_partitions: int
    top_k: int
    dtype: torch.dtype
    device: torch.device

    def inputs(self) -> list[Tensor]:
        """q, k, v, log_decay, router logits, then q, k and log_decay of the shared partition."""
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        T, H, D = self.tokens, self.heads, self.dim
        q, k, v, shared_q, shared_k = (normal(T, H, D) for _ in range(5))
        decays = [F.logsigmoid(normal(T, H, D)) / 16 for _ in range(2)]
        low = [x.to(self.dtype) for x in (q, k.softmax(-1), v, shared_q, shared_k.softmax(-1))]
        logits = normal(T, self.num_partitions)
        return [x.requires_grad_() for x in (*low[:3], decays[0], logits, *low[3:], decays[1])]


def call(problem: Problem, inputs: list[Tensor], backend: str) -> Tensor:
    return sse_attention(*inputs[:5], tuple(inputs[5:]), top_k=problem.top_k, backend=backend)[0]


def measure(problem: Problem, run: Callable[[list[Tensor]], Tensor], seconds: float) -> dict[str, float]:
    """Milliseconds (median and fastest) and, on a GPU, the peak of allocated memory in MiB, inputs included."""
    inputs = problem.inputs()
    weight = torch.ones_like(run(inputs))
    cuda = problem.device.type == "cuda"

    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    def both() -> None:
        run(inputs).backward(weight)

    result = {}
    for name, function in (("forward", forward), ("forward_backward", both)):
        function()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        while len(times) < 5 or sum(times) < seconds:
            start = _now(cuda)
            function()
            times.append(_now(cuda) - start)
        result[f"{name}_ms"] = round(1e3 * statistics.median(times), 3)
        result[f"{name}_fastest_ms"] = round(1e3 * min(times), 3)
        if cuda:
            result[f"{name}_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return result


def _now(cuda: bool) -> float:
    """Wall clock of a GPU run; on the CPU the time of its one thread, which other programs disturb less."""
    if not cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def largest_error(problem: Problem) -> float:
    """Worst relative error of outputs and gradients, in float32 against the float64 reference."""
    short = dc.replace(problem, tokens=130, dtype=torch.float32)
    doubles = [x.detach().double().requires_grad_() for x in short.inputs()]
    exact_o = call(short, doubles, "reference")
    exact = [exact_o, *torch.autograd.grad(exact_o.sum(), doubles)]
    inputs, worst = short.inputs(), 0.0
    o = call(short, inputs, "varlen")
    for value, truth in zip((o, *torch.autograd.grad(o.sum(), inputs)), exact, strict=True):
        worst = max(worst, ((value.double() - truth).norm() / truth.norm()).item())
    return worst


def by_chunk_size(problem: Problem, chunk_size: int) -> Callable[[list[Tensor]], Tensor]:
    def run(inputs: list[Tensor]) -> Tensor:
        operands = operands_of(build_inputs(*inputs[:5], tuple(inputs[5:]), top_k=problem.top_k))
        attend = functools.partial(gated_linear_attention, chunk_size=chunk_size)
        return sse_attention_varlen(operands, attend=attend)[0]

    return run


def environment(device: torch.device) -> dict[str, Any]:
    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=False).stdout.strip()

    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": git("rev-parse", "HEAD") or "unknown",
        "kernels_changed_since_commit": bool(git("status", "--porcelain", "sse_convert/kernels")),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "clock": "wall, synchronised" if device.type == "cuda" else "process time of one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[chunked.CHUNK_SIZE, 32, 128], help="of varlen")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time spent on each figure")
    options = parser.parse_args()

    torch.set_num_threads(1)
    device = torch.device(options.device)
    problems = [
        Problem(
            tokens=tokens, heads=options.heads, dim=options.dim, num_partitions=options.partitions,
            top_k=options.top_k, dtype=getattr(torch, options.dtype), device=device,
        )
        for tokens in options.tokens
    ]  # fmt: skip
    surroundings = environment(device)
    error = largest_error(problems[0])
    if not error <= TOLERANCE:
        sys.exit(
            f"the backend is wrong: relative error {error:.1e}, expected at most {TOLERANCE:.0e}; nothing was timed"
        )

    rows = []
    for problem in problems:
        runs = [("varlen", size, by_chunk_size(problem, size)) for size in options.chunk_sizes]
        for _, _, run in runs:  # the allocator settles, so that no figure depends on the order
            measure(problem, run, 0.0)
        for name, size, run in runs:
            figures = measure(problem, run, options.seconds)
            rows.append({"tokens": problem.tokens, "backend": name, "chunk_size": size, **figures})
            print(rows[-1], file=sys.stderr)
    shape = {key: getattr(options, key) for key in ("heads", "dim", "partitions", "top_k", "dtype")}
    report = {
        "schema": 1, "environment": surroundings, "shape": {**shape, "shared_partition": True},
        "worst_relative_error_float32": error, "results": rows,
    }  # fmt: skip
    write_json(options.out, report)


if __name__ == "__main__":
    main()
