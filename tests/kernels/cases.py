"""Random inputs of the operator, and a way to run a backend on them with every gradient."""

import dataclasses as dc
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention

CHUNKED = ("varlen",)
BACKENDS = (*CHUNKED, "recurrent")
SHARED_NAMES = ("shared q", "shared k", "shared log_decay", "shared v")


@dc.dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of one call; `inputs` makes its tensors."""

    lengths: tuple[int, ...] = (5,)
    num_partitions: int = 4
    top_k: int = 1
    heads: int = 2
    groups: int = 1
    dim: int = 8
    value_dim: int = 6
    shared: bool = True
    per_partition: bool = False
    write_gate: bool = True
    read_gate: bool = True
    delta: bool = False
    initial_state: bool = True
    decay_scale: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        changed = (f for f in dc.fields(self) if getattr(self, f.name) != f.default)
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed).replace(" ", "") or "default"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)])

    def options(self) -> dict[str, Any]:
        return {
            "top_k": self.top_k,
            "write_gate": self.write_gate,
            "read_gate": self.read_gate,
            "cu_seqlens": self.cu_seqlens,
        }

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Tensors by argument name; made in float64 first, so that all dtypes see the same numbers."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        T, N, H, D, V = self.tokens, self.num_partitions, self.heads, self.dim, self.value_dim
        Hq, P = H * self.groups, (N,) if self.per_partition else ()
        x = {
            "q": normal(T, *P, Hq, D),
            "k": normal(T, *P, H, D).softmax(-1),
            "v": normal(T, *P, H, V),
            "log_decay": F.logsigmoid(normal(T, H, D)) * self.decay_scale,
            "router_logits": normal(T, N),
        }
        if self.shared:
            x["shared q"], x["shared k"] = normal(T, Hq, D), normal(T, H, D).softmax(-1)
            x["shared log_decay"] = F.logsigmoid(normal(T, H, D)) * self.decay_scale
            if self.per_partition:
                x["shared v"] = normal(T, H, V)
        if self.delta:
            names = ("k", "shared k") if self.shared else ("k",)
            x.update({name: F.normalize(x[name] - 0.1, dim=-1) for name in names})
            x["write_strength"] = normal(T, H).sigmoid()
            if self.shared:
                x["shared_write_strength"] = normal(T, H).sigmoid()
        if self.initial_state:
            x["initial_state"] = normal(len(self.lengths), N + self.shared, H, D, V)
        return {name: tensor.to(dtype) for name, tensor in x.items()}


def run(case: Case, backend: str, inputs: dict[str, Tensor] | None = None, **overrides: Any) -> tuple[Tensor, Tensor]:
    """Output and final state."""
    x = dict(case.inputs() if inputs is None else inputs)
    shared = tuple(x.pop(name) for name in SHARED_NAMES if name in x) or None
    options = {**case.options(), **overrides}
    o, final = sse_attention(**x, shared=shared, output_final_state=True, backend=backend, **options)
    assert final is not None
    return o, final


def run_with_gradients(
    case: Case, backend: str, inputs: dict[str, Tensor] | None = None, **overrides: Any
) -> dict[str, Tensor]:
    """Output, final state, and the gradient of a fixed random combination of both in every input."""
    x = {name: t.clone().requires_grad_() for name, t in (case.inputs() if inputs is None else inputs).items()}
    o, final = run(case, backend, x, **overrides)
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    gradients = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
    return {"o": o.detach(), "final": final.detach(), **{f"d {n}": g for n, g in zip(x, gradients, strict=True)}}
