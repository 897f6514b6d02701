"""Several projections of a few rows in one launch, of their RMS norm where there is one, from weights where they are.

    o_j = r sum_i (gain_i + offset) x_i weight_ji + bias_j,    r = 1 / sqrt(mean(x^2) + eps)

over the outputs j of all weights, in float32. Since r multiplies the whole sum, the norm costs no pass of its own.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton.generation.row_tiles import row_tiles


def row_products(
    x: Tensor, gain: Tensor | None, eps: float, offset: float, weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    """The projections of x, or of its norm, side by side.

    Args:
        x: [rows, in], contiguous.
        gain: [in], weight of the norm; None for none.
        eps: added to the mean.
        offset: added to the gain.
        weights: each [out, in], contiguous, all of one dtype.
        biases: each [out] or None, as many as weights, all of one dtype.

    Returns:
        float32 [rows, sum of out].
    """
    rows, inputs = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    block_out, block_in = row_tiles(inputs, sum(sizes))
    begins = (0, *itertools.accumulate(triton.cdiv(size, block_out) for size in sizes))
    o = torch.empty(rows, sum(sizes), dtype=torch.float32, device=x.device)
    held = next((bias for bias in biases if bias is not None), None)
    lengths = tuple(0 if bias is None else len(bias) for bias in biases)
    with torch.cuda.device_of(x):
        row_products_kernel[(rows, begins[-1])](
            x, gain, tuple(weights), None if held is None else tuple(held if b is None else b for b in biases), o, eps,
            IN=inputs, OUT=sum(sizes), SIZES=sizes, BEGINS=begins, BIASED=lengths, OFFSET=offset,
            BI=block_in, BO=block_out, num_warps=4,
        )  # fmt: skip
    return o


@triton.jit(do_not_specialize=["eps"])
def row_products_kernel(
    x, gain, weights, biases, o, eps,
    IN: tl.constexpr, OUT: tl.constexpr, SIZES: tl.constexpr, BEGINS: tl.constexpr, BIASED: tl.constexpr,
    OFFSET: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """BO outputs of one weight and one row.

    Grid (rows, blocks of outputs). Bytes of an output, in bfloat16: 2 IN of its weight, from memory once for all rows;
    x and gain are in caches. Tiles: 1024 inputs, 8 to a thread; outputs so few that eight programs of 4 warps per
    multiprocessor have all weights on their way at once; steps over the inputs unrolled, so that none of their loads
    waits for a product."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    weight, size, begin, first, biased = weights[0], SIZES[0], 0, 0, BIASED[0]
    bias = weights[0] if biases is None else biases[0]
    before: tl.constexpr = 0
    for i in tl.static_range(1, len(SIZES)):
        before += SIZES[i - 1]
        here = block >= BEGINS[i]
        weight, size = tl.where(here, weights[i], weight), tl.where(here, SIZES[i], size)
        begin, first = tl.where(here, BEGINS[i], begin), tl.where(here, before, first)
        if biases is not None:
            bias, biased = tl.where(here, biases[i], bias), tl.where(here, BIASED[i], biased)
    out = (block - begin) * BO + tl.arange(0, BO)
    acc = tl.zeros([BO, BI], tl.float32)
    squares = tl.zeros([BI], tl.float32)
    for start in tl.static_range(0, IN, BI):
        i = start + tl.arange(0, BI)
        inside = (out < size)[:, None] & (i < IN)[None, :]
        b_w = tl.load(weight + out[:, None] * IN + i[None, :], mask=inside, other=0.0)
        b_x = tl.load(x + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
        if gain is not None:
            squares += b_x * b_x
            b_x *= tl.load(gain + i, mask=i < IN, other=0.0).to(tl.float32) + OFFSET
        acc += b_w.to(tl.float32) * b_x[None, :]
    b_o = tl.sum(acc, 1)
    if gain is not None:
        b_o *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    if biases is not None:
        b_o += tl.where(out < biased, tl.load(bias + out, mask=out < biased).to(tl.float32), 0.0)
    tl.store(o + row * OUT + first + out, b_o, mask=out < size)
