"""Is the baseline called KDA fla-core's? Its operator beside fla-core's, both against our definition in float64.

    pip install fla-core==0.6.0 einops
    python -m benchmarks.paper.kda --out benchmarks/paper/kda.json          # one GPU, minutes

KDA (arXiv:2510.26692) is the gated delta rule with a decay per key channel, which is a case of SSE: one partition, no
gates, keys of norm 1. Compared are outputs and gradients on random inputs; exits with 6 if fla-core computes something
else. COMMIT names the commit where the checkout has no git.
"""

import argparse
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.hybrid_measure import environment
from sse_convert.cli.runner import reporting_errors
from sse_convert.console import say
from sse_convert.errors import DependencyError, VerificationError
from sse_convert.files import write_json
from sse_convert.kernels.dispatch import sse_attention

NAMES = ("q", "k", "v", "log_decay", "strength")
LIMIT = 0.02
"""relative error that bfloat16 explains"""


def inputs(tokens: int, heads: int, dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Random operands [1, T, H, D] in float64: keys and queries of norm 1, log decays, strengths [1, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, gate = (torch.randn(1, tokens, heads, dim, generator=generator, dtype=torch.float64) for _ in range(4))
    strength = torch.rand(1, tokens, heads, generator=generator, dtype=torch.float64)
    return {
        "q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "log_decay": F.logsigmoid(gate) / 16,
        "strength": strength,
    }  # fmt: skip


def ours(x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    """SSE with one partition and no gates under the delta rule; [1, T, H, D]."""
    one = {name: value[0] for name, value in x.items()}
    logits = one["q"].new_zeros(len(one["q"]), 1)
    o, _ = sse_attention(
        one["q"], one["k"], one["v"], one["log_decay"], logits, top_k=1, write_strength=one["strength"],
        write_gate=False, read_gate=False, backend=backend,
    )  # fmt: skip
    return o[None]


def theirs(x: dict[str, Tensor]) -> Tensor:
    """fla-core's chunked operator; [1, T, H, D]."""
    from fla.ops.kda import chunk_kda

    o: Tensor = chunk_kda(x["q"], x["k"], x["v"], x["log_decay"], x["strength"])[0]
    return o


def with_gradients(run: Any, x: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of its sum of squares, in float64 on the CPU; decays and strengths stay in float32."""
    exact = dtype == torch.float64
    leaves = {
        name: value.to(device, dtype if exact or name in NAMES[:3] else torch.float32).requires_grad_()
        for name, value in x.items()
    }
    o = run(leaves)
    gradients = torch.autograd.grad(o.float().square().sum() if not exact else o.square().sum(), list(leaves.values()))
    found = {"o": o, **dict(zip((f"d{name}" for name in leaves), gradients, strict=True))}
    return {name: value.detach().double().cpu() for name, value in found.items()}


def errors(run: Any, x: dict[str, Tensor], exact: dict[str, Tensor], device: torch.device) -> dict[str, float]:
    """Relative errors by tensor."""
    found = with_gradients(run, x, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return {name: float((found[name] - own).norm() / own.norm()) for name, own in exact.items()}


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="JSON file to write")
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--dim", type=int, default=64, help="of keys and values")
    options = p.parse_args(arguments)
    if find_spec("fla") is None:
        raise DependencyError(
            "fla-core is missing", expected="KDA's operator", fix="pip install fla-core==0.6.0 einops"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = inputs(options.tokens, options.heads, options.dim)
    exact = with_gradients(lambda own: ours(own, "varlen"), x, torch.device("cpu"), torch.float64)
    found = {name: errors(run, x, exact, device) for name, run in (("ours", ours), ("fla-core", theirs))}
    report = {
        "schema": 1, "environment": environment(device), "fla_core": metadata.version("fla-core"),
        "tokens": options.tokens, "heads": options.heads, "dim": options.dim, "relative_errors": found,
    }  # fmt: skip
    write_json(options.out, report)
    say("\n".join(f"{who}: " + ", ".join(f"{n} {e:.1e}" for n, e in own.items()) for who, own in found.items()))
    if (worst := max(found["fla-core"].values())) > LIMIT:
        raise VerificationError(f"fla-core's KDA is {worst:.1%} from ours", expected=f"at most {LIMIT:.0%}")


if __name__ == "__main__":
    sys.exit(main())
