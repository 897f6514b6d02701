"""Attention of one token per sequence against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.triton.generation import token_attention as module
from sse_convert.kernels.triton.generation.token_attention import token_attention
from tests.tolerance import assert_same


def inputs(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v of (B, H, G, L, D, V) and a random mask."""
    B, H, G, L, D, V = shape
    q, k, v = torch.randn(B, H * G, D), torch.randn(B, H, L, D), torch.randn(B, H, L, V)
    mask = torch.rand(B, L) < 0.6
    mask[:, L // 2] = True
    return [q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), mask.to(device)]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    attend = F.scaled_dot_product_attention
    return attend(q.double()[:, :, None], k, v, attn_mask=mask[:, None, None], scale=scale)[:, :, 0]


SHAPES = (
    (1, 1, 1, 1, 16, 16),
    (2, 2, 3, 65, 16, 32),
    (3, 1, 17, 200, 20, 12),
    (1, 2, 2, 300, 64, 64),
    (2, 1, 1, 7, 80, 96),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    given = inputs(shape, dtype, device)
    o = token_attention(*given, 0.3)
    assert o.dtype == dtype
    assert_same(o, exact(*given, 0.3), "o", 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_splits_do_not_change_the_result(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAMS", programs)
    given = inputs((1, 2, 2, 500, 16, 16), torch.float32, device)
    assert_same(token_attention(*given, 0.25), exact(*given, 0.25), "o", 1e-5)


def test_slots_that_are_not_seen_are_not_read(device: str) -> None:
    q, k, v, _ = inputs((2, 1, 2, 200, 16, 16), torch.float32, device)
    mask = torch.zeros(2, 200, dtype=torch.bool, device=device)
    mask[0, 130:140] = mask[1, 3] = True
    k = k.where(mask[:, None, :, None], float("nan"))
    v = v.where(mask[:, None, :, None], float("nan"))
    o = token_attention(q, k, v, mask, 0.25)
    assert_same(o, exact(q, k.nan_to_num(), v.nan_to_num(), mask, 0.25), "o", 1e-5)


def test_one_mask_for_all_sequences_and_large_products(device: str) -> None:
    q, k, v, mask = inputs((3, 2, 1, 130, 16, 16), torch.float32, device)
    q = q * 300
    assert_same(token_attention(q, k, v, mask[:1], 0.25), exact(q, k, v, mask[:1].expand(3, -1), 0.25), "o", 1e-5)


def test_torch_compile_takes_the_operator_whole(device: str) -> None:
    given = inputs((2, 2, 2, 70, 16, 16), torch.float32, device)
    compiled = torch.compile(lambda *x: token_attention(*x, 0.25) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), token_attention(*given, 0.25) * 2)
