"""Whether a candidate is right: its output and gradients against float64, before anything is timed."""

import dataclasses as dc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.kernels.operator_candidates import Leaves, Problem
from benchmarks.kernels.operator_cases import Case

WRONG = 3e-2
"""relative error beyond which a candidate is not timed; bfloat16 intermediates alone cost up to 1e-2"""
HUGE = 1e9
ALL_HEADS = 2**13
"""tokens up to which all heads are compared; beyond, the first one alone, and not the gradient of the router"""


@dc.dataclass
class Exact:
    """Exact answers of one case, made when first asked for."""

    case: Case
    answers: dict[str, dict[str, Tensor]] = dc.field(default_factory=dict)

    def errors(self, problem: Problem) -> dict[str, float] | None:
        """||x - exact|| / ||exact|| of o and of each gradient; None if exact is unknown."""
        if problem.exact is None:
            return None
        if problem.kind not in self.answers:
            self.answers[problem.kind] = self._exact(problem)
        with poisoned_memory():
            o, *gradients = outcome(problem, backward=self.case.backward)
        names = ("o", *(f"d {name}" for name in problem.leaves))
        found = dict(zip(names, (o, *gradients), strict=False))
        return {name: relative_error(self._part(name, found[name]), exact)
                for name, exact in self.answers[problem.kind].items()}  # fmt: skip

    def _exact(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.exact is not None
        leaves: Leaves = {name: self._part(name, x).detach().double().requires_grad_(self.case.backward)
                          for name, x in problem.leaves.items()}  # fmt: skip
        o = problem.exact(leaves)
        answers = {"o": o.detach()}
        if self.case.backward:
            wanted = [name for name in leaves if name != "router_logits" or self._all_heads]
            d_o = self._part("d_o", problem.d_o).double()
            gradients = torch.autograd.grad(o, [leaves[name] for name in wanted], d_o)
            answers |= {f"d {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
        return answers

    @property
    def _all_heads(self) -> bool:
        return self.case.tokens <= ALL_HEADS

    def _part(self, name: str, x: Tensor) -> Tensor:
        """The heads that are compared: all, or those of the first state."""
        if self._all_heads or name.endswith("router_logits"):
            return x
        return x[:, : max(1, x.shape[1] // self.case.heads)]


def outcome(problem: Problem, *, backward: bool) -> tuple[Tensor, ...]:
    """o, and the gradients of the leaves if wanted."""
    if not backward:
        with torch.no_grad():
            return (problem.run(),)
    o = problem.run()
    leaves = list(problem.leaves.values())  # that of the router is not used by one partition
    return o, *torch.autograd.grad(o, leaves, problem.d_o, allow_unused=True, materialize_grads=True)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact|| in float64, ||x|| if exact is zero; what is not finite is HUGE."""
    size = exact.norm().item() or 1.0
    error = (x.double() - exact).norm().item() / size
    return float(f"{error:.3g}") if error < HUGE else HUGE


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors without values are NaN, so that reading what nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
