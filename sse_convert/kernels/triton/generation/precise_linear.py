"""A projection of a few rows computed in float32 from operands of any precision, which torch would have to copy."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.torch_modes import operator_name

TILE = 4096
"""weights that a program holds at once"""


@torch.library.custom_op(operator_name(__name__, "precise_linear"), mutates_args=())
def precise_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias, products and sums in float32.

    Args:
        x: [..., in], few rows.
        weight: [out, in].
        bias: [out], or None.

    Returns:
        float32 [..., out].
    """
    inputs, outputs = x.shape[-1], weight.shape[0]
    o = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32, device=x.device)
    rows = o.numel() // outputs
    block_in = min(1024, triton.next_power_of_2(inputs))
    block_out = min(TILE // block_in, triton.next_power_of_2(outputs))
    if rows:
        with torch.cuda.device_of(x):
            precise_linear_kernel[(triton.cdiv(outputs, block_out), rows)](
                x.contiguous(), weight.contiguous(), bias, o,
                IN=inputs, OUT=outputs, BI=block_in, BO=block_out, num_warps=4,
            )  # fmt: skip
    return o


@precise_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32, device=x.device)


@triton.jit
def precise_linear_kernel(
    x, weight, bias, o,
    IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = x weight^T + bias of BO outputs of one row.

    Grid (blocks of outputs, rows). Bytes of a row, with a weight in bfloat16: 2 IN OUT, and the little that x and o
    have. Tiles: 4096 weights, 32 to a thread of 4 warps. Inputs are contiguous, so up to 1024 of them; what is left
    makes outputs, few enough that a projection of 16 rows of weights has four programs."""
    row = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) * BO + tl.arange(0, BO)
    acc = tl.zeros([BO, BI], tl.float32)
    for start in range(0, IN, BI):
        i = start + tl.arange(0, BI)
        b_x = tl.load(x + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
        inside = (out < OUT)[:, None] & (i < IN)[None, :]
        b_w = tl.load(weight + out[:, None] * IN + i[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += b_w * b_x[None, :]
    b_o = tl.sum(acc, 1)
    if bias is not None:
        b_o += tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
    tl.store(o + row * OUT + out, b_o, mask=out < OUT)
