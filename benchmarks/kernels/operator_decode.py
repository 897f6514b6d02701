"""One decoding step, one token for each of many sequences: who takes part, and the exact answer in float64."""

import dataclasses as dc
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels import operator_published as published
from benchmarks.kernels.operator_candidates import FEW_TOKENS, Leaves, fla_attend, sse
from benchmarks.kernels.operator_cases import FLA_STEP, OURS, VARLEN
from benchmarks.kernels.operator_check import poisoned_memory, relative_error
from benchmarks.kernels.operator_inputs import Inputs, make_state
from benchmarks.kernels.operator_slots import as_taken
from sse_convert.kernels.dispatch import sse_attention

CHECKED_ROWS = 8
"""sequences that are compared with float64"""


@dc.dataclass(frozen=True, kw_only=True)
class Step:
    """One candidate on one batch. Rows are sequences."""

    state: Tensor
    run: Callable[[Tensor], tuple[Tensor, Tensor]]
    """state -> (o, new state), overwriting the state or not"""
    by_row: Callable[[Tensor], Tensor]
    """a state with the rows first"""
    leaves: Leaves
    exact: Callable[[Leaves, Tensor], tuple[Tensor, Tensor]]
    """the same in float64 on a few rows of the leaves and of the state"""

    def once(self) -> tuple[Tensor]:
        """One step, without gradients."""
        with torch.no_grad():
            return (self.run(self.state)[0],)

    def errors(self) -> dict[str, float]:
        """Relative errors of o and of the new state."""
        leaves = {name: x[:CHECKED_ROWS].detach().double() for name, x in self.leaves.items()}
        with torch.no_grad():
            exact_o, exact_state = self.exact(leaves, self.by_row(self.state)[:CHECKED_ROWS].double())
            with poisoned_memory():
                o, state = self.run(self.state.clone())
        rows = self.by_row(state)[:CHECKED_ROWS]
        return {"o": relative_error(o[:CHECKED_ROWS], exact_o), "state": relative_error(rows, exact_state)}


def step(candidate: str, x: Inputs) -> Step:
    """The candidate's tensors and functions."""
    if candidate == FLA_STEP:
        return _bare(x)
    state, S = make_state(x.case, x.d_o.device), len(x.case.lengths)
    backend = "auto" if candidate == OURS else "recurrent"
    if candidate != VARLEN:
        return Step(state=state, run=lambda s: sse_step(x.leaves, s, x, backend), by_row=lambda s: s,
                    leaves=x.leaves, exact=lambda t, s: sse_step(t, s, x, "recurrent"))  # fmt: skip
    attend = fla_attend(recurrent=S <= FEW_TOKENS, states=True)
    shared_first = torch.cat([state[:, -1], state[:, :-1].flatten(0, 1)])
    return Step(
        state=shared_first, run=lambda s: published.varlen_step(x, s, attend), leaves=x.leaves,
        by_row=lambda s: torch.cat([s[S:].unflatten(0, (S, -1)), s[:S, None]], 1),
        exact=lambda t, s: sse_step(t, s, x, "recurrent"),
    )  # fmt: skip


def sse_step(t: Leaves, state: Tensor, x: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Our operator, one token per sequence, the state overwritten."""
    o, final = sse(t, x, backend, state, torch.arange(len(t["q"]) + 1, device=state.device))
    assert final is not None
    return o, final


def _bare(x: Inputs) -> Step:
    """fla's recurrent kernel on K + 1 states per token that somebody has already gathered; rows are states."""
    top_k, shared, names = x.case.top_k, x.case.shared, ["q", "k", "v", "log_decay"]
    names += ["write_strength"] if x.case.delta else []
    rows = {n: [as_taken(x, n)] * top_k + [as_taken(x, f"shared {n}" if f"shared {n}" in x.leaves else n)] * shared
            for n in names}  # fmt: skip
    leaves = {name: torch.cat(parts).detach() for name, parts in rows.items()}
    state = torch.cat([make_state(x.case, x.d_o.device)[:, 0]] * (top_k + shared))
    cu = torch.arange(len(state) + 1, device=state.device)
    attend = delta_step if x.case.delta else fla_attend(recurrent=True, states=True)

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = attend(*leaves.values(), cu, state)
        assert final is not None
        return o, final

    def exact(t: Leaves, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, *strength = t.values()
        o, final = sse_attention(
            q, k, v, log_decay, q.new_zeros(len(state), 1), top_k=1, write_gate=False, read_gate=False,
            write_strength=strength[0] if strength else None,
            cu_seqlens=torch.arange(len(state) + 1), initial_state=state[:, None], output_final_state=True,
            backend="recurrent",
        )  # fmt: skip
        assert final is not None
        return o, final[:, 0]

    return Step(state=state, run=run, by_row=lambda s: s, leaves=leaves, exact=exact)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """fla's recurrent kernel of the delta rule with a decay per channel."""
    from fla.ops.kda import fused_recurrent_kda

    o, final = fused_recurrent_kda(
        q[None], k[None], v[None], g=log_decay[None], beta=beta[None], cu_seqlens=cu_seqlens, initial_state=state,
        output_final_state=True,
    )  # fmt: skip
    return o[0], final


def floor_bytes(x: Inputs) -> int:
    """States of the partitions used, and of a shared one, read and written once, in float32."""
    return (x.case.top_k + x.case.shared) * x.case.tokens * x.case.heads * x.case.dim**2 * 4 * 2
