"""The operator of an earlier commit beside today's, in one process on one GPU: times alternate, results are compared.

    git worktree add /tmp/before 38ccf3a
    python -m benchmarks.kernels.before_after /tmp/before --out before_after.json

The earlier package is imported from a copy, under another name. Times are medians of five alternations of six calls.
"""

import argparse
import importlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.hybrid_measure import environment

ALTERNATIONS, CALLS = 5, 6
CASES: dict[str, dict[str, Any]] = {
    "figure 8k": {"tokens": 8192},
    "figure 64k": {"tokens": 65536},
    "paper mixer 32k": {"tokens": 32768, "groups": 2, "k_map": "softmax", "logits": True},
    "hub recipe 32k": {
        "tokens": 32768, "groups": 2, "k_map": "relu", "logits": True, "partitions": 16, "top_k": 2,
    },
    "delta rule 64k": {"tokens": 65536, "k_map": "l2", "delta": True},
}  # fmt: skip
"""eight state heads of 128 channels, two packed sequences, bf16; N = 4, k = 1 unless a case says otherwise"""


def earlier_operator(checkout: Path) -> Callable[..., Any]:
    """`sse_attention` of another checkout, whose package gets the name `sse_before`."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / "sse_convert", folder / "sse_before")
    for path in (folder / "sse_before").rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("sse_convert", "sse_before"), encoding="utf-8")
    sys.path.insert(0, str(folder))
    found: Callable[..., Any] = importlib.import_module("sse_before.kernels.dispatch").sse_attention
    return found


def inputs(case: dict[str, Any], heads: int = 8, dim: int = 128) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments and options of `sse_attention` for a case, on the GPU."""
    generator, T = torch.Generator("cuda").manual_seed(0), case["tokens"]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def decay() -> Tensor:
        logits = 4 * random(T, heads, dim) + 2
        return logits.bfloat16() if case.get("logits") else F.logsigmoid(logits) / 16

    def heads_of(count: int) -> Tensor:
        return random(T, count, dim).bfloat16()

    queries = heads * case.get("groups", 1)
    values = [heads_of(queries), heads_of(heads), heads_of(heads), decay(), random(T, case.get("partitions", 4))]
    options: dict[str, Any] = {
        "top_k": case.get("top_k", 1),
        "k_map": case.get("k_map", "identity"),
        "decay_normalizer": 16.0 if case.get("logits") else None,
        "cu_seqlens": torch.tensor([0, T // 2, T], device="cuda", dtype=torch.int32),
        "write_strength": torch.sigmoid(random(T, heads)) if case.get("delta") else None,
        "backend": "triton",
    }
    return [*values, (heads_of(queries), heads_of(heads), decay())], options


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def measured(case: dict[str, Any], operators: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Times in ms and differences of one case."""
    values, options = inputs(case)
    leaves = [tensor.requires_grad_() for tensor in (*values[:-1], *values[-1])]
    do = torch.randn_like(operators["after"](*values, **options)[0])

    def both(operator: Callable[..., Any]) -> list[Tensor]:
        return list(torch.autograd.grad(operator(*values, **options)[0], leaves, do))

    def forward(operator: Callable[..., Any]) -> Tensor:
        with torch.no_grad():
            found: Tensor = operator(*values, **options)[0]
        return found

    times: dict[str, list[float]] = {}
    for _ in range(ALTERNATIONS):
        for name, operator in operators.items():
            times.setdefault(f"{name}, forward", []).append(milliseconds(lambda o=operator: forward(o)))
            times.setdefault(f"{name}, both ways", []).append(milliseconds(lambda o=operator: both(o)))
    before, after = (forward(operators[name]) for name in ("before", "after"))
    gradients = zip(both(operators["before"]), both(operators["after"]), strict=True)
    return {
        "ms": {name: statistics.median(found) for name, found in times.items()},
        "all_ms": times,
        "output_difference": _relative(after, before),
        "gradient_difference": max(_relative(new, old) for old, new in gradients),
    }


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def main() -> None:
    """Measure every case and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the earlier commit")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from sse_convert.kernels.dispatch import sse_attention

    operators = {"before": earlier_operator(options.checkout), "after": sse_attention}
    report: dict[str, Any] = {"environment": environment(torch.device("cuda")), "cases": {}}
    for name, case in CASES.items():
        report["cases"][name] = measured(case, operators)
        print(name, {key: round(value, 3) for key, value in report["cases"][name]["ms"].items()}, flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
