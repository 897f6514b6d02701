"""The first half of a gated feed-forward network in one launch: norm, both projections, SiLU and product.

o_j = silu(r sum_i (gain_i + offset) x_i gate_ji) (r sum_i (gain_i + offset) x_i up_ji),  r = 1 / sqrt(mean(x^2) + eps)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton.generation.row_tiles import row_tiles


def gated_product(x: Tensor, gain: Tensor, eps: float, offset: float, gate: Tensor, up: Tensor) -> Tensor:
    """What the second half reads.

    Args:
        x: [rows, in], contiguous.
        gain: [in], weight of the norm.
        eps: added to the mean.
        offset: added to the gain.
        gate: [out, in], contiguous.
        up: [out, in], contiguous, of the same dtype.

    Returns:
        [rows, out] in x's dtype.
    """
    (rows, inputs), outputs = x.shape, gate.shape[0]
    o = x.new_empty(rows, outputs)
    block_out, block_in = row_tiles(inputs, 2 * outputs)
    block_out = max(1, block_out // 2)
    with torch.cuda.device_of(x):
        gated_product_kernel[(rows, triton.cdiv(outputs, block_out))](
            x, gain, gate, up, o, eps, IN=inputs, OUT=outputs, OFFSET=offset, BI=block_in, BO=block_out, num_warps=4,
        )  # fmt: skip
    return o


@triton.jit(do_not_specialize=["eps"])
def gated_product_kernel(
    x, gain, gate, up, o, eps,
    IN: tl.constexpr, OUT: tl.constexpr, OFFSET: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """BO outputs of one row.

    Grid (rows, blocks of outputs). Bytes of an output, in bfloat16: 4 IN of both weights, from memory once for all
    rows; x and gain are in caches. Tiles: 1024 inputs of both weights, each with half the outputs of a plain product;
    steps over the inputs unrolled, so that none of their loads waits for a product."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BO + tl.arange(0, BO)
    gates = tl.zeros([BO, BI], tl.float32)
    ups = tl.zeros([BO, BI], tl.float32)
    squares = tl.zeros([BI], tl.float32)
    for start in tl.static_range(0, IN, BI):
        i = start + tl.arange(0, BI)
        inside = (out < OUT)[:, None] & (i < IN)[None, :]
        at = out[:, None] * IN + i[None, :]
        b_gate = tl.load(gate + at, mask=inside, other=0.0)
        b_up = tl.load(up + at, mask=inside, other=0.0)
        b_x = tl.load(x + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
        squares += b_x * b_x
        b_x *= tl.load(gain + i, mask=i < IN, other=0.0).to(tl.float32) + OFFSET
        gates += b_gate.to(tl.float32) * b_x[None, :]
        ups += b_up.to(tl.float32) * b_x[None, :]
    r = tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    b_g = tl.sum(gates, 1) * r
    b_o = b_g * tl.sigmoid(b_g) * (tl.sum(ups, 1) * r)
    tl.store(o + row * OUT + out, b_o.to(o.dtype.element_ty), mask=out < OUT)
