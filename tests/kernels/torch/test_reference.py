"""The definition itself: a sum done by hand, finite differences, and a derivation that shares no code with it."""

import math

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from tests.kernels.cases import Case, run
from tests.tolerance import assert_same


def test_two_tokens_by_hand() -> None:
    """Both tokens go to partition 1; every number below is written out from the equations."""
    e = math.exp(1) / (1 + math.exp(1))
    column = lambda *values: torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)  # noqa: E731
    q, k, v, decay = column(2, 3), column(5, 7), column(11, 13), column(0.9, 0.5)
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    shared = (column(1, 2), column(3, 4), column(0.8, 0.25).log())
    o, state = sse_attention(
        q, k, v, decay.log(), logits, shared, top_k=1, output_final_state=True, scale=10.0, backend="reference"
    )
    first = e * 5 * 11
    second = 0.5 * first + e * 7 * 13
    shared_first = 3 * 11
    shared_second = 0.25 * shared_first + 4 * 13
    expected = [10 * (e * 2 * first + 1 * shared_first), 10 * (e * 3 * second + 2 * shared_second)]
    assert_same(o.flatten(), torch.tensor(expected, dtype=torch.float64), "o")
    assert state is not None
    assert_same(state.flatten(), torch.tensor([0.0, second, shared_second], dtype=torch.float64), "state")


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(2, 3), num_partitions=3, top_k=2, heads=1, groups=2, dim=3, value_dim=2),
        Case(lengths=(4,), num_partitions=3, heads=1, dim=2, value_dim=2, per_partition=True),
    ],
    ids=str,
)
def test_gradients_match_finite_differences(case: Case) -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in case.inputs().items()}

    def operator(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(case, "reference", dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradcheck(operator, tuple(inputs.values()))


def dense_sse(case: Case) -> tuple[Tensor, Tensor]:
    """SSE as masked attention: T x T scores per partition, decay as a difference of running sums, no recurrence."""
    x = case.inputs()
    T, N = x["router_logits"].shape
    e_TN = x["router_logits"].exp() / x["router_logits"].exp().sum(1, keepdim=True)
    rank_TN = (e_TN[:, None, :] > e_TN[:, :, None]).sum(-1)  # how many partitions are better; no ties in these inputs
    used_TN = rank_TN < case.top_k
    write_TN = torch.where(used_TN, e_TN if case.write_gate else torch.ones_like(e_TN), 0.0)
    read_TN = torch.where(used_TN, e_TN if case.read_gate else torch.ones_like(e_TN), 0.0)
    sequence_T = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    visible_TT = (sequence_T[:, None] == sequence_T) & torch.ones(T, T, dtype=torch.bool).tril()
    last_S = case.cu_seqlens[1:] - 1

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        q = q * case.dim**-0.5
        k, v, log_decay, start = (
            t.repeat_interleave(case.groups, dim=1) for t in (k, v, log_decay, start)
        )  # a state head per query head
        running = torch.stack([log_decay[: t + 1][sequence_T[: t + 1] == sequence_T[t]].sum(0) for t in range(T)])
        between = (running[:, None] - running[None]).masked_fill(~visible_TT[..., None, None], -math.inf)
        scores = torch.einsum("ihd,jhd,ijhd->hij", q, k, between.exp())
        out = torch.einsum("hij,jhv->ihv", scores, v)
        out = out + torch.einsum("ihd,ihdv->ihv", q * running.exp(), start[sequence_T])
        final = torch.einsum("sjhd,jhd,jhv->shdv", between.exp()[last_S], k, v)
        return out, (final + running[last_S].exp()[..., None] * start)[:, :: case.groups]

    outs, finals = [], []
    for p in range(N):
        q, k, v = (x[name][:, p] if case.per_partition else x[name] for name in ("q", "k", "v"))
        w, r = write_TN[:, p, None, None], read_TN[:, p, None, None]
        decay = x["log_decay"] * used_TN[:, p, None, None]
        out, final = attend(q * r, k * w, v, decay, x["initial_state"][:, p])
        outs.append(out)
        finals.append(final)
    if case.shared:
        v = x["shared v"] if case.per_partition else x["v"]
        out, final = attend(x["shared q"], x["shared k"], v, x["shared log_decay"], x["initial_state"][:, N])
        outs.append(out)
        finals.append(final)
    return torch.stack(outs).sum(0), torch.stack(finals, dim=1)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(17,)),
        Case(lengths=(5, 1, 12), top_k=2, groups=2),
        Case(lengths=(9, 8), top_k=1, write_gate=False),
        Case(lengths=(9, 8), top_k=3, read_gate=False, shared=False),
        Case(lengths=(3, 14), num_partitions=3, top_k=3, per_partition=True, groups=3),
        Case(lengths=(20,), num_partitions=1, write_gate=False, read_gate=False),
    ],
    ids=str,
)
def test_equals_dense_masked_attention(case: Case) -> None:
    for value, exact, name in zip(run(case, "reference"), dense_sse(case), ("o", "final"), strict=True):
        assert_same(value, exact, name)
