"""Sums over the slots of each token: of any number of ranks, rounded once, and traceable."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sse_convert.kernels.triton.slot_sums import BLOCK, sum_slots

SHAPES = {"less than a block": (7, 3, 5), "blocks": (BLOCK // 16, 2, 16), "a block and a rest": (BLOCK // 8 + 1, 8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_equals_the_sum(shape: tuple[int, ...], ranks: int, dtype: torch.dtype, device: str) -> None:
    slots = torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    found = sum_slots(slots)
    assert found.dtype == dtype
    assert found.shape == shape
    exact = slots.double().sum(0)
    added = ranks * torch.finfo(torch.float32).eps * slots.double().abs().sum(0)
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + added).all()


def test_reads_slots_that_lie_apart(device: str) -> None:
    slots = torch.arange(4 * 6 * 10, dtype=torch.float32, device=device).view(4, 6, 10).transpose(1, 2)
    assert torch.equal(sum_slots(slots), slots.sum(0))


def test_no_tokens(device: str) -> None:
    assert sum_slots(torch.zeros(3, 0, 8, 16, device=device)).shape == (0, 8, 16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_is_traced_without_a_kernel(ranks: int, device: str) -> None:
    """As torch.compile does for the gradients of the operator."""
    slots = torch.randn(ranks, 6, 10, device=device)
    traced = make_fx(sum_slots, tracing_mode="fake")(slots)
    assert torch.equal(traced(slots), slots.sum(0))
    with FakeTensorMode():
        assert sum_slots(torch.empty(ranks, 6, 10)).shape == (6, 10)
