"""The interpreter is held to what a GPU computes, on the points where it is known to differ."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton.interpreter import bf16_to_float32, float32_to_bf16, float32_to_tf32

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on this machine")


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    tl.store(out + tile, tl.dot(tl.load(a + tile), tl.load(b + tile), input_precision=PRECISION))


@triton.jit
def _add_and_scale_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i) + tl.load(b + i) * -tl.load(a + i))


@triton.jit
def _cast_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty))


@triton.jit
def _masked_load_kernel(a, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i, mask=i < n))


@triton.jit
def _copy_kernel(a, out, first, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.store(out + i, tl.load(a + i))


@triton.jit
def _numbers_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, x + 1)
    tl.store(out + N + i, (i + 1) / 2 + (i + 1) // 2)
    tl.store(out + 2 * N + i, 1 - x)
    tl.store(out + 3 * N + i, x / 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot(dtype: torch.dtype, device: str) -> None:
    a, b = torch.randn(2, 32, 32, device=device).to(dtype)
    out = torch.empty(32, 32, device=device)
    _dot_kernel[(1,)](a, b, out, 32, "ieee")
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((out - exact).abs() <= 32 * 2**-23 * size).all()  # 32 float32 sums, which tensor cores may truncate


@interpreted
def test_tf32_dot_drops_bits() -> None:
    a, b = torch.randn(2, 32, 32)
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, out, 32, "tf32")
    dropped = [torch.from_numpy(float32_to_tf32(x.numpy())) for x in (a, b)]
    assert torch.allclose(out, dropped[0] @ dropped[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out, a @ b, rtol=1e-5, atol=1e-5)
    assert float32_to_tf32(np.float32([1 + 2**-10, 1 + 2**-11, np.inf])).tolist() == [1 + 2**-10, 1, np.inf]


def test_bfloat16_arithmetic(device: str) -> None:
    a, b = torch.randn(2, 64, device=device).bfloat16()
    out = torch.empty(64, device=device, dtype=torch.bfloat16)
    _add_and_scale_kernel[(1,)](a, b, out, 64)
    product = a.double() * b.double()
    exact = a.double() - product
    assert ((out - exact).abs() <= 2**-8 * (product.abs() + exact.abs())).all()  # a GPU may round the product or not


def test_a_number_is_what_it_is_beside_each_type(device: str) -> None:
    """Twice: the second time it is known from the first."""
    numbers = torch.arange(1, 17, device=device)
    expected = torch.stack([numbers + 1.0, numbers / 2 + numbers // 2, 1.0 - numbers, numbers / 4])
    for dtype in (torch.float32, torch.int32, torch.float32):
        out = torch.empty(4, 16, device=device)
        _numbers_kernel[(1,)](numbers.to(dtype), out, 16)
        assert torch.equal(out, expected)


def test_casts_to_bfloat16_round_to_nearest_even(device: str) -> None:
    a = torch.cat([torch.randn(60), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("nan"), 3e38])]).to(device)
    out = torch.empty(64, device=device, dtype=torch.bfloat16)
    _cast_kernel[(1,)](a, out, 64)
    assert torch.equal(out.nan_to_num(7), a.bfloat16().nan_to_num(7))
    back = torch.empty(64, device=device)
    _cast_kernel[(1,)](out, back, 64)
    assert torch.equal(back.nan_to_num(7), out.float().nan_to_num(7))


def test_every_bit_pattern_survives_a_round_trip() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bf16_to_float32(bits)
    back = float32_to_bf16(values)
    assert np.array_equal(back[~np.isnan(values)], bits[~np.isnan(values)])
    assert np.isnan(bf16_to_float32(back[np.isnan(values)])).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lanes_switched_off_by_a_mask_load_nan(dtype: torch.dtype) -> None:
    a, out = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    _masked_load_kernel[(1,)](a, out, 10, 16)
    assert out[:10].eq(1).all()
    assert out[10:].isnan().all()


@interpreted
@pytest.mark.parametrize(("sizes", "first"), [((15, 16), 0), ((16, 15), 0), ((16, 16), -1)])
def test_touching_memory_outside_the_arguments_is_an_error(sizes: tuple[int, int], first: int) -> None:
    a, out = (torch.zeros(size) for size in sizes)
    with pytest.raises(Exception, match="outside the kernel's arguments"):
        _copy_kernel[(1,)](a, out, first, 16)


@interpreted
def test_the_rest_of_a_storage_is_outside_as_well() -> None:
    a, out = torch.zeros(32), torch.zeros(16)
    _copy_kernel[(1,)](a[1:17], out, 0, 16)
    with pytest.raises(Exception, match="load of 1 elements outside the kernel's arguments"):
        _copy_kernel[(1,)](a[1:16], out, 0, 16)
