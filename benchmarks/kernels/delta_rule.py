"""Time of the SSE operator under the gated delta rule beside gated linear attention, both on Triton, on one GPU.

    python -m benchmarks.kernels.delta_rule --out delta_rule.json

bf16, keys of unit norm, one decay per channel. Milliseconds per call, the mean of ten calls after three, eager: what a
training step sees of them. COMMIT names the commit where the checkout has no git.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.hybrid_measure import environment
from sse_convert.console import say
from sse_convert.files import write_json
from sse_convert.kernels.dispatch import sse_attention

CASES = (
    {"sequences": 8, "length": 2048, "num_partitions": 60, "top_k": 4, "heads": 8, "dim": 64},
    {"sequences": 2, "length": 8192, "num_partitions": 60, "top_k": 4, "heads": 8, "dim": 64},
    {"sequences": 1, "length": 65536, "num_partitions": 60, "top_k": 4, "heads": 8, "dim": 64},
    {"sequences": 1, "length": 65536, "num_partitions": 4, "top_k": 1, "heads": 8, "dim": 128},
)
"""the steps of the small teacher's recipes, the same heads on one long sequence, and heads of 128"""
WARM, CALLS = 3, 10


def measure(case: dict[str, int], *, delta: bool) -> dict[str, float]:
    """Milliseconds of the forward pass and of both passes."""
    S, length, H, D = case["sequences"], case["length"], case["heads"], case["dim"]
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(S * length, *shape, generator=generator, device="cuda")

    q, v, shared_q = (normal(H, D).bfloat16() for _ in range(3))
    k, shared_k = (F.normalize(normal(H, D), dim=-1).bfloat16() for _ in range(2))
    decay, shared_decay = (F.logsigmoid(normal(H, D) + 3) for _ in range(2))
    logits, strength = normal(case["num_partitions"]), normal(H).sigmoid() if delta else None
    leaves = [x.requires_grad_() for x in (q, k, v, decay, logits, shared_q, shared_k, shared_decay, strength)
              if x is not None]  # fmt: skip
    offsets, do = torch.arange(S + 1, device="cuda") * length, normal(H, D).bfloat16()

    def forward() -> Tensor:
        return sse_attention(
            q, k, v, decay, logits, (shared_q, shared_k, shared_decay), top_k=case["top_k"], write_strength=strength,
            cu_seqlens=offsets, backend="triton",
        )[0]  # fmt: skip

    with torch.no_grad():
        forward_ms = _milliseconds(forward)
    return {"forward": forward_ms, "both": _milliseconds(lambda: torch.autograd.grad(forward(), leaves, do))}


def _milliseconds(run: Callable[[], object]) -> float:
    for _ in range(WARM):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) / CALLS * 1e3, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        say("error: this needs a CUDA GPU")
        return 2
    report: dict[str, Any] = {"environment": environment(torch.device("cuda")), "cases": []}
    for case in CASES:
        found = {name: measure(case, delta=name == "delta") for name in ("gla", "delta")}
        report["cases"].append({**case, **found})
        write_json(options.out, report)
        say(f"{case}: " + ", ".join(f"{name} {ms['forward']} / {ms['both']} ms" for name, ms in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
