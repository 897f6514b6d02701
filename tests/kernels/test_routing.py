import pytest
import torch

from sse_convert.errors import UsageError
from sse_convert.kernels.routing import balance_loss, load, route


def test_gate_is_the_softmax_over_all_partitions_in_float32() -> None:
    logits = torch.randn(7, 5).bfloat16()
    routing = route(logits, top_k=2)
    assert routing.gate_TN.dtype == torch.float32
    assert torch.equal(routing.gate_TN, logits.float().softmax(-1))
    assert route(logits.double(), top_k=2).gate_TN.dtype == torch.float64


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 1.0], [-1.0, -1.0, 3.0, 3.0]])
    routing = route(logits, top_k=3)
    assert routing.used_TK.tolist() == [[0, 1, 2], [1, 2, 0], [2, 3, 0]]
    many = route(torch.zeros(1, 64), top_k=64)  # few would stay in order by any way of sorting
    assert many.used_TK.tolist() == [list(range(64))]


def test_a_token_routes_the_same_in_every_batch() -> None:
    logits = torch.randn(1000, 8)
    logits[::3] = logits[::3].round()  # ties
    whole = route(logits, top_k=3)
    for size in (1, 7, 250):
        parts = [route(part, top_k=3) for part in logits.split(size)]
        assert torch.equal(torch.cat([p.gate_TN for p in parts]), whole.gate_TN)
        assert torch.equal(torch.cat([p.used_TK for p in parts]), whole.used_TK)


@pytest.mark.parametrize("top_k", [0, 5])
def test_out_of_range_top_k_is_refused(top_k: int) -> None:
    with pytest.raises(UsageError, match=f"^top_k is {top_k}\nexpected: 1 to the number of partitions \\(4\\)"):
        route(torch.zeros(3, 4), top_k)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_balance_loss_is_one_when_partitions_are_used_alike(top_k: int) -> None:
    logits = torch.stack([torch.arange(4.0).roll(i) for i in range(4)])  # every partition has every rank once
    routing = route(logits, top_k)
    assert load(routing).tolist() == pytest.approx([top_k / 4] * 4)
    assert balance_loss(routing).item() == pytest.approx(1.0)


def test_balance_loss_is_n_when_one_partition_takes_everything() -> None:
    routing = route(torch.tensor([[50.0, 0.0, 0.0, 0.0]]).expand(10, -1), top_k=1)
    assert load(routing).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert balance_loss(routing).item() == pytest.approx(4.0)


def test_balance_loss_follows_its_formula_and_sends_gradient_to_the_logits() -> None:
    logits = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    routing = route(logits, top_k=2)
    share = torch.stack([(routing.used_TK == i).any(1).double().mean() for i in range(5)])
    expected = 5 / 2 * sum(share[i] * routing.gate_TN[:, i].mean() for i in range(5))
    loss = balance_loss(routing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.norm() > 0


def test_masked_tokens_do_not_count() -> None:
    logits = torch.randn(12, 4, dtype=torch.float64)
    mask = torch.arange(12) % 3 != 0
    masked, alone = route(logits, top_k=2), route(logits[mask], top_k=2)
    torch.testing.assert_close(balance_loss(masked, mask), balance_loss(alone), rtol=1e-12, atol=0)
    torch.testing.assert_close(load(masked, mask), load(alone), rtol=1e-12, atol=0)


def test_no_tokens_give_zero_loss_and_load() -> None:
    for routing, mask in ((route(torch.zeros(0, 4), 1), None), (route(torch.zeros(3, 4), 1), torch.zeros(3) > 0)):
        assert balance_loss(routing, mask).item() == 0.0
        assert load(routing, mask).tolist() == [0.0] * 4
