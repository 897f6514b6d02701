"""One decoding step, one token for each of many sequences: who takes part, and the exact answer in float64."""

import dataclasses as dc
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels import operator_published as published
from benchmarks.kernels.operator_candidates import FEW_TOKENS, Leaves, fla_attend
from benchmarks.kernels.operator_cases import FLA_STEP, OURS, VARLEN
from benchmarks.kernels.operator_check import poisoned_memory, relative_error
from benchmarks.kernels.operator_inputs import Inputs, make_state
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
    state, top_k, S = make_state(x.case, x.d_o.device), x.case.top_k, len(x.case.lengths)
    backend = "auto" if candidate == OURS else "recurrent"
    if candidate != VARLEN:
        return Step(state=state, run=lambda s: sse_step(x.leaves, s, top_k, backend), by_row=lambda s: s,
                    leaves=x.leaves, exact=lambda t, s: sse_step(t, s, top_k, "recurrent"))  # fmt: skip
    attend = fla_attend(recurrent=S <= FEW_TOKENS, states=True)
    shared_first = torch.cat([state[:, -1], state[:, :-1].flatten(0, 1)])
    return Step(
        state=shared_first, run=lambda s: published.varlen_step(x, s, attend), leaves=x.leaves,
        by_row=lambda s: torch.cat([s[S:].unflatten(0, (S, -1)), s[:S, None]], 1),
        exact=lambda t, s: sse_step(t, s, top_k, "recurrent"),
    )  # fmt: skip


def sse_step(t: Leaves, state: Tensor, top_k: int, backend: str) -> tuple[Tensor, Tensor]:
    """Our operator, one token per sequence, the state overwritten."""
    o, final = sse_attention(
        t["q"], t["k"], t["v"], t["log_decay"], t["router_logits"],
        (t["shared q"], t["shared k"], t["shared log_decay"]), top_k=top_k,
        cu_seqlens=torch.arange(len(t["q"]) + 1, device=state.device), max_seqlen=1,
        initial_state=state, output_final_state=True, inplace_state=True, backend=backend,
    )  # fmt: skip
    assert final is not None
    return o, final


def _bare(x: Inputs) -> Step:
    """fla's recurrent kernel on K + 1 states per token that somebody has already gathered; rows are states."""
    top_k, names = x.case.top_k, ("q", "k", "v", "log_decay")
    rows = {n: [x.leaves[n]] * top_k + [x.leaves.get(f"shared {n}", x.leaves[n])] for n in names}
    leaves = {name: torch.cat(parts).detach() for name, parts in rows.items()}
    state = torch.cat([make_state(x.case, x.d_o.device)[:, 0]] * (top_k + 1))
    attend, cu = fla_attend(recurrent=True, states=True), torch.arange(len(state) + 1, device=state.device)

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = attend(*leaves.values(), cu, state)
        assert final is not None
        return o, final

    def exact(t: Leaves, state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = sse_attention(
            *t.values(), t["q"].new_zeros(len(state), 1), top_k=1, write_gate=False, read_gate=False,
            cu_seqlens=torch.arange(len(state) + 1), initial_state=state[:, None], output_final_state=True,
            backend="recurrent",
        )  # fmt: skip
        assert final is not None
        return o, final[:, 0]

    return Step(state=state, run=run, by_row=lambda s: s, leaves=leaves, exact=exact)


def floor_bytes(x: Inputs) -> int:
    """States of K + 1 partitions read and written once, in float32."""
    return (x.case.top_k + 1) * x.case.tokens * x.case.heads * x.case.dim**2 * 4 * 2
