import pytest
import torch

from sse_convert.errors import UsageError
from sse_convert.kernels.routing import balance_loss, balanced_bias, load, route


def test_gate_is_the_softmax_over_all_partitions_in_float32() -> None:
    logits = torch.randn(7, 5).bfloat16()
    routing = route(logits, top_k=2)
    assert routing.gate_TN.dtype == torch.float32
    assert torch.equal(routing.gate_TN, logits.float().softmax(-1))
    assert route(logits.double(), top_k=2).gate_TN.dtype == torch.float64


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 1.0], [-1.0, -1.0, 3.0, 3.0]])
    routing = route(logits, top_k=3)
    assert routing.write_TK.tolist() == [[0, 1, 2], [1, 2, 0], [2, 3, 0]]
    many = route(torch.zeros(1, 64), top_k=64)  # few would stay in order by any way of sorting
    assert many.write_TK.tolist() == [list(range(64))]


def test_read_and_write_sets_are_prefixes_of_one_ranking() -> None:
    routing = route(torch.randn(50, 8), top_k=2, read_top_k=5)
    assert torch.equal(routing.write_TK, routing.read_TK[:, :2])
    assert torch.equal(routing.used(), routing.read_TK)
    assert torch.equal(route(torch.zeros(1, 8), top_k=5, read_top_k=2).used(), torch.arange(5)[None])


def test_bias_moves_the_selection_and_not_the_gate() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    biased = route(logits, top_k=1, router_bias=torch.tensor([0.0, 0.0, 1.0]))
    assert biased.write_TK.tolist() == [[2]]
    assert torch.equal(biased.gate_TN, route(logits, top_k=1).gate_TN)


def test_a_token_routes_the_same_in_every_batch() -> None:
    logits = torch.randn(1000, 8)
    logits[::3] = logits[::3].round()  # ties
    whole = route(logits, top_k=3)
    for size in (1, 7, 250):
        parts = [route(part, top_k=3) for part in logits.split(size)]
        assert torch.equal(torch.cat([p.gate_TN for p in parts]), whole.gate_TN)
        assert torch.equal(torch.cat([p.write_TK for p in parts]), whole.write_TK)


@pytest.mark.parametrize(
    ("top_k", "read_top_k", "name"), [(0, None, "top_k"), (5, None, "top_k"), (1, 5, "read_top_k")]
)
def test_out_of_range_top_k_is_refused(top_k: int, read_top_k: int | None, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} is [05]\nexpected: 1 to the number of partitions \\(4\\)"):
        route(torch.zeros(3, 4), top_k, read_top_k)


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
    share = torch.stack([(routing.write_TK == i).any(1).double().mean() for i in range(5)])
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


def test_bias_step_raises_what_is_used_less() -> None:
    bias = balanced_bias(torch.zeros(3), torch.tensor([0.9, 0.1, 0.5]), step=0.01)
    assert bias.tolist() == pytest.approx([-0.01, 0.01, 0.0])


def test_bias_steps_balance_a_skewed_router() -> None:
    logits = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0, 0.0, -2.0])
    bias = torch.zeros(4)
    before = load(route(logits, top_k=1))
    for _ in range(400):
        bias = balanced_bias(bias, load(route(logits, top_k=1, router_bias=bias)), step=0.005)
    after = load(route(logits, top_k=1, router_bias=bias))
    assert before.max() > 0.7
    assert after.max() < 0.3
    assert after.min() > 0.2
