"""RMS norm with a learned scale in one kernel, without gradients: what torch does with up to eight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.torch_modes import operator_name

TILE = 2048
"""channels that a program of a prefill holds, in one row or several; that of a step holds one row"""
MANY_ROWS = 8192


@torch.library.custom_op(operator_name(__name__, "rms_norm"), mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, rounds: bool, offset: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dim, in float32.

    Args:
        x: [..., D]; a program holds a row, so not of very many channels.
        weight: [D] or [H * D], one set for each index of the dim before the last.
        eps: added to the mean.
        rounds: round to x's dtype before the weight multiplies, as most language models do.
        offset: added to the weight (Gemma stores it less one).
        dtype: of the result.

    Returns:
        [..., D], contiguous.
    """
    D = x.shape[-1]
    o = torch.empty(x.shape, dtype=dtype, device=x.device)
    if rows := x.numel() // D:
        block = triton.next_power_of_2(D)
        together = max(1, TILE // block) if rows >= MANY_ROWS else 1
        with torch.cuda.device_of(x):
            rms_norm_kernel[(triton.cdiv(rows, together),)](
                x.contiguous(), weight.contiguous(), o, eps, rows,
                SETS=weight.numel() // D, D=D, BR=together, BD=block, ROUNDS=rounds, OFFSET=offset,
                num_warps=min(8, max(1, together * block // 256)),
            )  # fmt: skip
    return o


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, rounds: bool, offset: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@triton.jit(do_not_specialize=["eps", "rows"])
def rms_norm_kernel(
    x, weight, o, eps, rows,
    SETS: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ROUNDS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """o = x / sqrt(mean(x^2) + eps) * (weight + offset) of BR rows.

    Grid (blocks of rows). Bytes of a row, in bfloat16: 2 D (x) + 2 D (o). Tiles: all channels of a row, so that it is
    read once; of a prefill's short rows as many as make 2048 channels, of a step's one, for more programs."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    b_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(weight + (row % SETS)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32) + OFFSET
    b_o = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    if ROUNDS:
        b_o = b_o.to(x.dtype.element_ty).to(tl.float32)
    tl.store(o + at, (b_o * b_w).to(o.dtype.element_ty), mask=inside)
