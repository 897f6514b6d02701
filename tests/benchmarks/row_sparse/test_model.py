import pytest
import torch

from benchmarks.paper.row_sparse.model import ModelSettings, RecallModel
from benchmarks.paper.row_sparse.update import RowSparse
from sse_convert.errors import UsageError
from tests.tolerance import assert_same

MIXERS = ("gla", "gla_softmax", "metala", "gsa")
UPDATES = [None, RowSparse(rows=2), RowSparse(rows=2)]


def settings(mixer: str, **changes: int) -> ModelSettings:
    return ModelSettings(**{"mixer": mixer, "width": 8, "vocab_size": 20} | changes)  # type: ignore[arg-type]


def ask(model: RecallModel, runs: int, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(20, (runs, 3, tokens)), torch.randint(tokens, (runs, 3, 2))


@pytest.mark.parametrize("mixer", MIXERS)
def test_models_that_share_a_call_do_not_touch_each_other(mixer: str) -> None:
    model = RecallModel(settings(mixer), UPDATES).double()
    inputs, positions = ask(model, 3)
    logits, keys = model(inputs, positions)
    balance = model.balance_loss(keys)
    assert logits.shape == (3, 3, 2, 20)
    for r, update in enumerate(UPDATES):
        alone = RecallModel(settings(mixer), [update]).double()
        alone.load_state_dict({name: weight[r : r + 1] for name, weight in model.state_dict().items()})
        own_logits, own_keys = alone(inputs[r : r + 1], positions[r : r + 1])
        assert_same(logits[r], own_logits[0], f"logits of model {r}")
        torch.testing.assert_close(balance[r], alone.balance_loss(own_keys)[0])
    gradients = torch.autograd.grad(logits[1].square().sum(), list(model.parameters()))
    for gradient in gradients:
        assert gradient[0].count_nonzero() == 0
        assert gradient[2].count_nonzero() == 0
    assert any(gradient[1].count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_sees_no_later_token(mixer: str) -> None:
    model = RecallModel(settings(mixer), UPDATES).double()
    inputs, _ = ask(model, 3)
    positions = torch.full((3, 3, 1), 6)
    changed = inputs.clone()
    changed[:, :, 7:] = (inputs[:, :, 7:] + 1) % 20
    assert torch.equal(model(inputs, positions)[0], model(changed, positions)[0])
    changed[:, :, 6] = (inputs[:, :, 6] + 1) % 20
    assert not torch.equal(model(inputs, positions)[0], model(changed, positions)[0])


def test_the_convolution_sees_as_many_tokens_as_it_says() -> None:
    """With one layer whose mixer says nothing, a prediction depends on no other token than its own."""
    model = RecallModel(settings("gla", layers=1), [None]).double()
    convolution = model.blocks[0].convolution
    x = torch.zeros(1, 1, 9, 8, dtype=torch.float64)
    x[0, 0, 3] = 1
    assert convolution(x)[0, 0].abs().sum(-1).gt(0).tolist() == [False] * 3 + [True] * 4 + [False] * 2
    newest = convolution.weight[0, 0, 0, :, -1]
    torch.testing.assert_close(convolution(x)[0, 0, 3], torch.nn.functional.silu(newest))


@pytest.mark.smoke
def test_state_sizes() -> None:
    assert settings("gla").state_size == 2 * 2 * 4 * 4
    assert settings("gsa", width=16, layers=1).state_size == 2 * 2 * 8 * 8


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="width 9 with 2 heads"):
        settings("gla", width=9)
    with pytest.raises(UsageError, match="'mamba'\nexpected: one of gla, gla_softmax, metala, gsa"):
        settings("mamba")
