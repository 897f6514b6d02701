"""Projections of a few rows in float32, whatever the operands are."""

import pytest
import torch

from sse_convert.kernels import triton_backend
from sse_convert.kernels.triton.generation.precise_linear import precise_linear
from sse_convert.modeling import initialise
from sse_convert.modeling.initialise import MOST_ROWS, PreciseProjection
from tests.tolerance import assert_same

SHAPES = (((3, 16), 5), ((1, 2, 1100), 16), ((7, 16), 300), ((2, 1), 1), ((0, 16), 4))


@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch_in_float64(
    shape: tuple[int, ...], outputs: int, dtype: torch.dtype, bias: bool, device: str
) -> None:
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(outputs, shape[-1]).to(device, dtype)
    b = torch.randn(outputs).to(device, dtype) if bias else None
    o = precise_linear(x, weight, b)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    assert o.dtype == torch.float32
    assert_same(o, exact, "o", 1e-6)


def test_the_layer_takes_it_for_few_tokens_without_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "GPU", device)
    calls, module = [], PreciseProjection(16, 8, bias=True).to(device, torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    real = initialise.keeps_precision
    monkeypatch.setattr(initialise, "keeps_precision", lambda x: (calls.append(real(x)), calls[-1])[1])
    for rows, gradients, expected in ((MOST_ROWS, False, True), (MOST_ROWS + 1, False, False), (3, True, False)):
        x = torch.randn(rows, 16, device=device).bfloat16()
        with torch.set_grad_enabled(gradients):
            o = module(x)
        assert calls[-1] is expected
        assert o.requires_grad is gradients
        plain = torch.nn.functional.linear(x.double(), module.weight.double(), module.bias.double())
        assert_same(o.detach(), plain.detach(), "o", 1e-6)
