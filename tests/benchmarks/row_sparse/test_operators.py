"""The parallel operators against the recurrences, written out token by token and row by row."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.row_sparse.definition import gated_linear_attention_steps, gated_slot_attention_steps
from benchmarks.paper.row_sparse.operators import gated_linear_attention, gated_slot_attention
from benchmarks.paper.row_sparse.update import RowSparse, apply_updates
from sse_convert.kernels.dispatch import sse_attention
from tests.tolerance import assert_same

UPDATES = [None, RowSparse(rows=2), RowSparse(rows=3, decay="all"), RowSparse(rows=9)]
R, B, H, D, V, M = 4, 2, 2, 4, 3, 5


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def by_head(steps: object, *inputs: Tensor) -> Tensor:
    """The definition for every model, row and head."""
    assert callable(steps)
    return torch.stack(
        [
            torch.stack(
                [torch.stack([steps(*(x[r, b, :, h] for x in inputs), update) for h in range(H)], 1) for b in range(B)]
            )
            for r, update in enumerate(UPDATES)
        ]
    )


def assert_results_agree(fast: Tensor, slow: Tensor, leaves: list[Tensor]) -> None:
    assert_same(fast, slow, "output")
    weight = torch.randn_like(slow)
    gradients = (torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (fast, slow))
    for i, (own, exact) in enumerate(zip(*gradients, strict=True)):
        assert_same(own, exact, f"gradient {i}")


@pytest.mark.parametrize("strength", [1.0, 30.0])
@pytest.mark.parametrize("T", [1, 2, 13, 16, 17])
def test_gated_linear_attention_equals_the_recurrence(T: int, strength: float) -> None:
    q, k, v = normal(R, B, T, H, D), normal(R, B, T, H, D), normal(R, B, T, H, V)
    gate = normal(R, B, T, H, D, scale=strength)
    log_decay = F.logsigmoid(gate)
    fast = gated_linear_attention(q, *_with_values(apply_updates(k, log_decay, UPDATES), v))
    assert_results_agree(fast, by_head(gated_linear_attention_steps, q, k, v, log_decay), [q, k, v, gate])


@pytest.mark.parametrize("strength", [1.0, 30.0])
@pytest.mark.parametrize("T", [1, 2, 13, 16, 17])
def test_gated_slot_attention_equals_the_recurrence(T: int, strength: float) -> None:
    q, k, v = normal(R, B, T, H, D), normal(R, B, T, H, D), normal(R, B, T, H, V)
    gate = normal(R, B, T, H, M, scale=strength)
    log_decay = F.logsigmoid(gate)
    strengths = -torch.expm1(log_decay)
    fast = gated_slot_attention(q, k, v, *apply_updates(strengths, log_decay, UPDATES))
    assert_results_agree(fast, by_head(gated_slot_attention_steps, q, k, v, strengths, log_decay), [q, k, v, gate])


@pytest.mark.smoke
def test_the_sse_operator_computes_the_same() -> None:
    """One partition, no gates, a row-sparse key and decay: what `sse_attention` does on long rows."""
    T = 70
    q, k, v, log_decay = (
        normal(1, 1, T, H, D), normal(1, 1, T, H, D), normal(1, 1, T, H, V), F.logsigmoid(normal(1, 1, T, H, D))
    )  # fmt: skip
    k, log_decay = apply_updates(k, log_decay, [RowSparse(rows=2)])
    packed = (x[0, 0] for x in (q, k, v, log_decay))
    exact, _ = sse_attention(
        *packed, torch.zeros(T, 1), top_k=1, write_gate=False, read_gate=False, scale=1.0, backend="reference"
    )
    assert_same(gated_linear_attention(q, k, v, log_decay)[0, 0], exact, "output")


def test_an_early_write_survives_in_a_row_that_later_tokens_spare() -> None:
    """The point of the framework: 1,000 tokens later a dense state has lost what a row-sparse one still holds."""
    T = 1000
    k = torch.zeros(2, 1, T, 1, 2, dtype=torch.float64)
    k[:, :, 0, :, 0], k[:, :, 1:, :, 1] = 1, 1
    q, v = torch.tensor([1.0, 0.0]).double().expand(2, 1, T, 1, 2), torch.ones(2, 1, T, 1, 1, dtype=torch.float64)
    log_decay = torch.full_like(k, -0.1)
    o = gated_linear_attention(q, *_with_values(apply_updates(k, log_decay, [None, RowSparse(rows=1)]), v))
    assert o[0, 0, -1].item() < 1e-40
    assert o[1, 0, -1].item() == pytest.approx(1)


def _with_values(keys_and_decays: tuple[Tensor, Tensor], v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, log_decay = keys_and_decays
    return k, v, log_decay
