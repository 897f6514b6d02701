"""Softmax attention of one new token per request over the keys and values that its window and sinks still hold.

A request's row holds [2, C, H, D]: keys and values of the first `sinks` positions, then a ring of the last `window`
positions, position p in column sinks + (p - sinks) % window. With the new key and value in column c, in one launch

    row[:, c] <- k, v      then      o = softmax_j(scale q k_j) v_j over the columns j that hold a position

Shape letters: R requests, H key heads, G query heads per key head, D head dim, C = sinks + window columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton.tiles import LOG2_E

TILE = 8192
"""elements of the keys of one step, which are on their way while the step before is computed; a quarter in float32,
whose products are no tensor core ones"""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, past: Tensor,
    *, window: int, sinks: int, scale: float, soft_cap: float | None,
) -> Tensor:  # fmt: skip
    """The new tokens' outputs; their keys and values are put into their rows.

    Args:
        q: [R, H * G, D]; of a token, what it has is contiguous, of k and v too.
        k: [R, H, D].
        v: [R, H, D].
        rows: [rows, 2, C, H, D]; what one row holds is contiguous. Row 0 takes what padding writes.
        slots: integer [R], the row of each request; negative for padding.
        past: integer [R], position of the new token; may be one for all, expanded.
        window: positions that a query sees, its own included.
        sinks: first positions, which stay visible.
        scale: multiplies the products.
        soft_cap: c of c * tanh(products / c); None for none.

    Returns:
        [R, H * G, D] in q's dtype.
    """
    (R, Hq, D), H = q.shape, k.shape[1]
    BD, low = max(16, triton.next_power_of_2(D)), q.element_size() == 2
    o = torch.empty(R, Hq, D, dtype=q.dtype, device=q.device)
    if R:
        assert all(x[0].is_contiguous() for x in (rows, q, k, v)), "what a row or a token holds must be contiguous"
        with torch.cuda.device_of(q):
            ring_kernel[(R, H)](
                q, k, v, rows, slots, past, o, q.stride(0), k.stride(0), v.stride(0), rows.stride(0), past.stride(0),
                scale, soft_cap,
                WINDOW=window, SINKS=sinks, H=H, G=Hq // H, D=D, BG=max(16, triton.next_power_of_2(Hq // H)),
                BD=BD, BC=max(16, min(64, (TILE if low else TILE // 4) // BD)), num_warps=4 if low else 8, num_stages=2,
            )  # fmt: skip
    return o


@triton.jit(do_not_specialize=["scale", "soft_cap"])
def ring_kernel(
    q, k, v, rows, slots, past, o, q_stride, k_stride, v_stride, row_stride, past_stride, scale, soft_cap,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BG: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All query heads of a key head, as rows of a product (16 at least).

    Grid (R, H). Bytes of a request and key head, in bfloat16: 4 C D (keys and values, once) + 4 D (written) + 4 D G (q,
    o). Tiles: 64 columns of 128 channels at a time: two such steps fit into the shared memory of any device, and a
    window of 128 takes three. The new key and value come into the tile from registers, so nothing waits for what is
    written."""
    C: tl.constexpr = SINKS + WINDOW
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    g = tl.arange(0, BG)
    d = tl.arange(0, BD)
    slot = tl.maximum(tl.load(slots + r).to(tl.int64), 0)
    newest = tl.maximum(tl.load(past + r * past_stride).to(tl.int32), 0)  # padding may count from anywhere
    new_column = tl.where(newest < SINKS, newest, SINKS + tl.maximum(newest - SINKS, 0) % WINDOW)
    row = rows + slot * row_stride + h * D
    low = rows.dtype.element_ty
    at_q = (h * G + g)[:, None] * D + d[None, :]
    in_q = (g < G)[:, None] & (d < D)[None, :]
    b_q = tl.load(q + r * q_stride + at_q, mask=in_q, other=0.0)
    new_k = tl.load(k + r * k_stride + h * D + d, mask=d < D, other=0.0).to(low)
    new_v = tl.load(v + r * v_stride + h * D + d, mask=d < D, other=0.0).to(low)
    largest = tl.full([BG], float("-inf"), tl.float32)
    weight = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        held = newest - ((newest - column) % WINDOW + WINDOW) % WINDOW
        seen = (column < C) & tl.where(column < SINKS, column <= newest, held >= SINKS)
        new = column == new_column
        at = column[:, None] * (H * D) + d[None, :]
        inside = (seen & (column != new_column))[:, None] & (d < D)[None, :]
        b_k = tl.where(new[:, None], new_k[None, :], tl.load(row + at, mask=inside, other=0.0)).to(q.dtype.element_ty)
        b_v = tl.where(new[:, None], new_v[None, :], tl.load(row + C * H * D + at, mask=inside, other=0.0))
        products = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if soft_cap is not None:
            products = soft_cap * (2.0 * tl.sigmoid(products * (2.0 / soft_cap)) - 1.0)
        products = tl.where(seen[None, :], products * LOG2_E, float("-inf"))
        top = tl.maximum(largest, tl.max(products, 1))
        anchor = tl.where(top == float("-inf"), 0.0, top)
        old = tl.exp2(largest - anchor)
        e = tl.exp2(products - anchor[:, None])
        weight = weight * old + tl.sum(e, 1)
        acc = tl.dot(e.to(b_q.dtype), b_v.to(b_q.dtype), acc * old[:, None], input_precision="ieee")
        largest = top
    place = row + new_column * (H * D) + d
    tl.store(place, new_k, mask=d < D)
    tl.store(place + C * H * D, new_v, mask=d < D)
    tl.store(o + r * (H * G * D) + at_q, (acc / weight[:, None]).to(o.dtype.element_ty), mask=in_q)
