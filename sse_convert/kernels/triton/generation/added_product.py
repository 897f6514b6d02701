"""A projection of a few rows added to the residual stream, of heads normed one by one where they are, in one launch.

o_j = residual_j + sum_i (r_h(i) scale_i x_i + beside_scale_h(i) beside_i) weight_ji + bias_j,
r_h = 1 / sqrt(mean of x^2 over head h + eps)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton.generation.row_tiles import row_tiles


def added_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scale: Tensor | None, head: int, eps: float,
    beside: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """residual + (x, or its normed and scaled heads, and those beside them) weight^T + bias.

    Args:
        x: [rows, in], contiguous.
        weight: [out, in], contiguous.
        bias: [out], or None.
        residual: [rows, out], contiguous.
        scale: [in], what normed heads are multiplied by; None for x as it is.
        head: channels of a head, a power of two that divides `in`; not used without scale.
        eps: added to the means.
        beside: heads [rows, in], contiguous, and what each is multiplied by, [in / head]; None for none. With scale.

    Returns:
        [rows, out] in residual's dtype.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    o = torch.empty_like(residual)
    block_out, block_in = row_tiles(inputs, outputs)
    if scale is not None:
        block_in = max(block_in, head)
    with torch.cuda.device_of(x):
        added_product_kernel[(rows, triton.cdiv(outputs, block_out))](
            x, weight, bias, residual, scale, *(beside or (None, None)), o, eps,
            IN=inputs, OUT=outputs, HEAD=head, BI=block_in, BO=block_out, num_warps=4,
        )  # fmt: skip
    return o


@triton.jit(do_not_specialize=["eps"])
def added_product_kernel(
    x, weight, bias, residual, scale, beside, beside_scale, o, eps,
    IN: tl.constexpr, OUT: tl.constexpr, HEAD: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """BO outputs of one row.

    Grid (rows, blocks of outputs). Bytes of an output, in bfloat16: 2 IN of its weight, from memory once for all rows;
    x and scale are in caches. Tiles: 1024 inputs, 8 to a thread, which are whole heads; one output where there are few,
    so that eight programs of 4 warps per multiprocessor have the weight on its way at once."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BO + tl.arange(0, BO)
    acc = tl.zeros([BO, BI], tl.float32)
    for start in tl.static_range(0, IN, BI):
        i = start + tl.arange(0, BI)
        inside = (out < OUT)[:, None] & (i < IN)[None, :]
        b_w = tl.load(weight + out[:, None] * IN + i[None, :], mask=inside, other=0.0)
        b_x = tl.load(x + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
        if scale is not None:
            heads = tl.reshape(b_x, [BI // HEAD, HEAD])
            heads *= tl.rsqrt(tl.sum(heads * heads, 1) / HEAD + eps)[:, None]
            b_x = tl.reshape(heads, [BI]) * tl.load(scale + i, mask=i < IN, other=0.0).to(tl.float32)
            if beside is not None:
                b_s = tl.load(beside_scale + i // HEAD, mask=i < IN, other=0.0).to(tl.float32)
                b_x += b_s * tl.load(beside + row * IN + i, mask=i < IN, other=0.0).to(tl.float32)
        acc += b_w.to(tl.float32) * b_x[None, :]
    at = row * OUT + out
    b_o = tl.sum(acc, 1) + tl.load(residual + at, mask=out < OUT, other=0.0).to(tl.float32)
    if bias is not None:
        b_o += tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
    tl.store(o + at, b_o.to(o.dtype.element_ty), mask=out < OUT)
