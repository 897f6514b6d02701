import pytest
import torch

from benchmarks.paper.row_sparse.update import RowSparse, apply_updates, row_balance_loss
from sse_convert.errors import ShapeError, UsageError

UPDATES = [None, RowSparse(rows=2), RowSparse(rows=2), RowSparse(rows=3, decay="all")]


def keys() -> torch.Tensor:
    return torch.randn(4, 5, 6, dtype=torch.float64)


@pytest.mark.smoke
def test_each_model_has_its_own_update() -> None:
    k, log_decay = keys(), -torch.rand(4, 5, 6, dtype=torch.float64) - 0.1
    sparse_k, sparse_decay = apply_updates(k, log_decay, UPDATES)
    assert torch.equal(sparse_k[0], k[0])
    assert torch.equal(sparse_decay[0], log_decay[0])
    for model, rows in ((1, 2), (2, 2), (3, 3)):
        largest = k[model] >= k[model].sort(-1, descending=True).values[:, rows - 1 : rows]
        assert torch.equal(sparse_k[model], k[model].where(largest, 0))
        assert torch.equal(sparse_decay[model], log_decay[model] if model == 3 else log_decay[model].where(largest, 0))


def test_softmax_runs_over_the_selected_rows_alone() -> None:
    k = keys()
    mapped, _ = apply_updates(k, torch.zeros_like(k), UPDATES, "softmax")
    torch.testing.assert_close(mapped.sum(-1), torch.ones(4, 5, dtype=torch.float64))
    assert (mapped > 0).sum(-1).tolist() == [[6] * 5, [2] * 5, [2] * 5, [3] * 5]
    torch.testing.assert_close(mapped[0], k[0].softmax(-1))


def test_ties_go_to_the_lowest_row() -> None:
    k, _ = apply_updates(torch.ones(1, 1, 4), torch.zeros(1, 1, 4), [RowSparse(rows=2)])
    assert k.tolist() == [[[1, 1, 0, 0]]]


def test_spared_rows_have_no_gradient() -> None:
    k, log_decay = keys().requires_grad_(), keys().requires_grad_()
    apply_updates(k, log_decay, [RowSparse(rows=2)] * 4)[0].square().sum().backward()
    assert k.grad is not None
    assert (k.grad != 0).sum(-1).eq(2).all()


def test_balance_is_one_when_rows_are_used_equally() -> None:
    k = torch.eye(4, dtype=torch.float64).repeat(3, 1)[None, :, None] * 50
    torch.testing.assert_close(row_balance_loss(k, [RowSparse(rows=1)]), torch.ones(1, dtype=torch.float64))


def test_balance_is_c_over_k_when_all_tokens_use_the_same_rows() -> None:
    k = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64).expand(1, 20, 3, 8)
    assert row_balance_loss(k, [RowSparse(rows=2)]).item() == pytest.approx(4)


def balanced(bias: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """The losses while their gradient moves a bias that all of 256 tokens add to their keys, and the last bias."""
    own, updates, losses = torch.randn(1, 256, 1, 8, dtype=torch.float64), [RowSparse(rows=2)], []
    for _ in range(200):
        bias = bias.detach().requires_grad_()
        loss = row_balance_loss(own + bias, updates).sum()
        losses.append(loss.item())
        bias = bias - 10 * torch.autograd.grad(loss, bias)[0]
    return losses, bias


def test_balance_loss_spreads_tokens_over_rows() -> None:
    losses, _ = balanced(torch.arange(8).double() / 4)
    assert losses[0] > 1.4
    assert losses[-1] < 1.02


def test_balance_loss_does_not_revive_a_row_that_no_token_selects() -> None:
    losses, bias = balanced(torch.tensor([-9.0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.float64))
    assert bias[0] == -9
    assert losses[-1] == pytest.approx(8 / 7, abs=0.02)


def test_dense_models_have_nothing_to_balance() -> None:
    losses = row_balance_loss(keys()[:, :, None], UPDATES)
    assert losses[0] == 0
    assert (losses[1:] > 0).all()


def test_mistakes_are_refused() -> None:
    with pytest.raises(UsageError, match="0 rows"):
        RowSparse(rows=0)
    with pytest.raises(UsageError, match="'some'\nexpected: one of selected, all"):
        RowSparse(rows=1, decay="some")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="2 updates for 4 models"):
        apply_updates(keys(), keys(), [None, None])
    with pytest.raises(ShapeError, match="2 updates for 4 models"):
        row_balance_loss(keys(), [None, None])
