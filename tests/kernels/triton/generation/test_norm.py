"""RMS norms in one kernel, next to torch's and to those of every family in transformers."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sse_convert.inference import fused_norms as norms
from sse_convert.inference.fused_norms import OFFSETS, fused_norms
from sse_convert.kernels import triton_backend
from sse_convert.kernels.triton.generation import norm as module
from sse_convert.kernels.triton.generation.norm import rms_norm
from tests.tolerance import assert_same


@pytest.mark.parametrize("many_rows", [1, 10**6])
@pytest.mark.parametrize(
    ("shape", "sets"), [((3, 16), 1), ((70, 5, 4, 20), 4), ((1, 1500), 1), ((3, 2500), 1), ((0, 16), 1)], ids=str
)
def test_equals_torch(
    shape: tuple[int, ...], sets: int, many_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY_ROWS", many_rows)
    x, weight = torch.randn(shape, device=device), torch.randn(sets * shape[-1], device=device)
    o = rms_norm(x, weight, 1e-6, False, 0.5, torch.float32)
    exact = F.rms_norm(x.double(), x.shape[-1:], eps=1e-6) * (weight.double() + 0.5).view(sets, -1).squeeze(0)
    assert o.shape == x.shape
    assert_same(o, exact, "o", 1e-6)


@pytest.mark.parametrize("rounds", [False, True])
def test_rounds_where_it_is_told_to(rounds: bool, device: str) -> None:
    x, weight = torch.randn(64, 48, device=device).bfloat16(), torch.randn(48, device=device)
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)
    expected = (normed.bfloat16().float() if rounds else normed) * weight
    o = rms_norm(x, weight, 1e-6, rounds, 0.0, torch.float32)
    assert ((o - expected).abs() < 1e-6 * expected.abs()).float().mean() > 0.99


def test_rows_of_another_layout_and_huge_and_vanishing_ones(device: str) -> None:
    x = torch.randn(16, 3, device=device).T * torch.tensor([[1e18], [1.0], [0.0]], device=device)
    o = rms_norm(x, torch.ones(16, device=device), 1e-6, False, 0.0, torch.float32)
    assert_same(o, F.rms_norm(x.double(), (16,), eps=1e-6), "o", 1e-6)
    assert not o[2].any()


class Holder(nn.Module):
    """A model with one norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


def norm_of(family: str) -> Any:
    name = family.lower()
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    norm = getattr(modeling, f"{family}RMSNorm")(24, eps=1e-5)
    norm.weight.data.normal_()
    return norm


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr(module, "rms_norm", lambda *args: (calls.append(1), rms_norm(*args))[1])
    return calls


@pytest.mark.parametrize("family", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_familys_norm_keeps_its_rounding(
    family: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all results have the same bits; sums in another order turn few of them."""
    monkeypatch.setattr(triton_backend, "GPU", device)
    calls = count_calls(monkeypatch)
    norm, x = norm_of(family).to(device, dtype), 3 * torch.randn(200, 24, device=device).to(dtype)
    with torch.no_grad():
        expected = norm(x)
        with fused_norms(Holder(norm)):
            assert "forward" in vars(norm)
            o = norm(x)
    assert "forward" not in vars(norm)
    assert len(calls) == 1
    assert o.dtype == expected.dtype
    assert_same(o, expected.double(), "o", 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
    if dtype == torch.bfloat16:
        assert (o == expected).float().mean() > 0.99


def test_what_the_kernel_is_not_for_runs_as_before(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "GPU", device)
    monkeypatch.setattr(norms, "MAX_CHANNELS", 23)
    norm, layer_norm = norm_of("Llama").to(device), nn.LayerNorm(24, device=device)
    model = nn.ModuleList([norm, layer_norm])
    x = torch.randn(3, 24, device=device)
    calls = count_calls(monkeypatch)
    with fused_norms(model):
        assert "forward" not in vars(layer_norm)
        with torch.no_grad():
            assert torch.equal(norm(x), type(norm).forward(norm, x))
        monkeypatch.setattr(norms, "MAX_CHANNELS", 24)
        assert norm(x).requires_grad
        assert norm(x.double()).dtype == torch.float64
    assert not calls
    model.forward = torch.compile(model.forward, backend="eager")
    with fused_norms(model):
        assert "forward" not in vars(norm)
    del model.forward
    norm.compile(backend="eager")
    with fused_norms(model):
        assert "forward" not in vars(norm)
