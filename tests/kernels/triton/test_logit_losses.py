"""Losses of logits in one kernel each, next to float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.triton import logit_losses as module
from sse_convert.kernels.triton.logit_losses import cross_entropy_, divergence_
from tests.tolerance import assert_same

HEADS = ((1.0, None), (0.3, 5.0))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 64)


def logits(x: Tensor, scale: float, cap: float | None) -> Tensor:
    z = x * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def drawn(tokens: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Logits of student and teacher, some of them far apart."""
    generator = torch.Generator().manual_seed(vocabulary)
    x, y = (4 * torch.randn(tokens, vocabulary, generator=generator) for _ in range(2))
    x[0, 0], y[0, -1] = 90.0, -90.0
    return [value.to(dtype).to(device) for value in (x, y)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 64, 200])
@pytest.mark.parametrize(("scale", "cap"), HEADS)
def test_divergence(scale: float, cap: float | None, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    x, y = drawn(5, vocabulary, dtype, device)
    exact = x.double().requires_grad_()
    p, q = (F.log_softmax(z, -1) for z in (logits(y.double(), 1.5, None), logits(exact, scale, cap)))
    expected = (p.exp() * (p - q)).sum(-1)
    expected.sum().backward()
    losses = divergence_(x, y, (scale, 1.5), (cap, None))
    assert_same(losses, expected.detach(), "loss", 1e-5)
    assert_same(x, exact.grad, "gradient", 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 64, 200])
@pytest.mark.parametrize(("scale", "cap"), HEADS)
def test_cross_entropy(scale: float, cap: float | None, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    x, _ = drawn(5, vocabulary, dtype, device)
    targets = torch.tensor([0, vocabulary - 1, 3, 6, 0], device=device)
    exact = x.double().requires_grad_()
    expected = F.cross_entropy(logits(exact, scale, cap), targets, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_(x, targets, scale, cap)
    assert_same(losses, expected.detach(), "loss", 1e-5)
    assert_same(x, exact.grad, "gradient", 1e-5 if dtype == torch.float32 else 2**-8)


def test_equal_models_do_not_diverge_and_no_tokens_are_no_loss(device: str) -> None:
    x, _ = drawn(3, 100, torch.float32, device)
    y = x.clone()
    assert divergence_(x, y, (1.0, 1.0), (None, None)).abs().max() < 1e-5
    assert x.abs().max() < 1e-6
    assert len(cross_entropy_(x[:0], torch.zeros(0, dtype=torch.int64, device=device), 1.0, None)) == 0


@pytest.mark.parametrize("spoiled", [0, 1])
def test_logits_that_are_no_numbers_show_in_the_loss(spoiled: int, device: str) -> None:
    both = drawn(3, 100, torch.float32, device)
    both[spoiled][1, 70] = torch.nan
    assert divergence_(*both, (1.0, 1.0), (None, None)).isnan().tolist() == [False, True, False]
