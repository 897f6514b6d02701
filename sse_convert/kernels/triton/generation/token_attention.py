"""Softmax attention of one new token per sequence over a cache of fixed size, for the layers that stay softmax.

Library kernels for one query either need the number of keys on the host, which a CUDA graph has not, or take a mask,
copy the keys once per query head and work on one multiprocessor per head. Here the slots are split over programs and
only slots from the first visible one of a program's share to the last are loaded, so the work follows what the cache
holds; which these are is known before the loop, so none of its loads waits for a mask.

Shape letters: B sequences, H key heads, G query heads per key head, L slots of the cache, D key dim, V value dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.torch_modes import operator_name
from sse_convert.kernels.triton.tiles import LOG2_E

BLOCK_BYTES = 32768
"""keys and values of one step of a program, of which two are on their way while one is used"""
PROGRAMS = 512
"""wanted in a launch, about four per multiprocessor"""
MOST_SPLITS = 64
MASK_BLOCK = 1024
"""slots whose mask is read at once to see where the visible ones begin and end"""


@torch.library.custom_op(operator_name(__name__, "token_attention"), mutates_args=())
def token_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T over the visible slots) v, accumulated in float32.

    Args:
        q: [B, Hq, D], Hq a multiple of H.
        k: [B, H, L, D], contiguous, of q's dtype.
        v: [B, H, L, V], contiguous, of q's dtype.
        mask: bool [B or 1, L], True where a sequence sees the slot; a sequence that sees none gets NaN.
        scale: multiplies the products.

    Returns:
        [B, Hq, V] in v's dtype.
    """
    (B, Hq, D), (H, L, V) = q.shape, v.shape[1:]
    G, BD, BV = Hq // H, max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(V))
    block = min(64, BLOCK_BYTES // (2 * max(BD, BV) * q.dtype.itemsize))
    splits = max(1, min(PROGRAMS // (B * H), MOST_SPLITS, triton.cdiv(L, block)))
    chunk = triton.cdiv(triton.cdiv(L, splits), block) * block
    splits = triton.cdiv(L, chunk)
    part = q.new_empty(B, Hq, splits, V, dtype=torch.float32)
    top, total = q.new_empty(2, B, Hq, splits, dtype=torch.float32)
    o = v.new_empty(B, Hq, V)
    with torch.cuda.device_of(q):
        attend_kernel[(B * H * splits,)](
            q.contiguous(), k, v, mask, part, top, total,
            scale, L, chunk, splits, mask.stride(0) if mask.shape[0] > 1 else 0,
            H=H, G=G, D=D, V=V, BG=max(16, triton.next_power_of_2(G)), BD=BD, BV=BV, BL=block, BM=MASK_BLOCK,
            num_warps=4 if q.dtype.itemsize == 2 else 8, num_stages=4 if BD <= 64 else 3,
        )  # fmt: skip
        combine_kernel[(B * Hq,)](
            part, top, total, o, splits, V=V, BV=BV, BS=triton.next_power_of_2(splits), num_warps=4
        )
    return o


@token_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return v.new_empty(*q.shape[:2], v.shape[3])


@triton.jit(do_not_specialize=["scale", "L", "chunk", "splits", "mask_stride"])
def attend_kernel(
    q, k, v, mask, part, top, total,
    scale, L, chunk, splits, mask_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """part = sum_j exp2(z_j - top) v_j and total = sum_j exp2(z_j - top) over `chunk` slots j, z = scale log2(e) q k_j,
    top the largest z.

    Grid (B * H * splits). Bytes of a key head, in bfloat16: 2 (D + V) of each visible slot, 2 of each slot (mask, read
    twice), 4 (V + 2) G of each split. Tiles: 64 slots of 128 channels, 32 KB, of which two steps are under way while
    one is used; query heads of a key head are rows of one product, 16 at least. As many splits as make four programs
    per multiprocessor."""
    split = tl.program_id(0) % splits
    h = tl.program_id(0) // splits % H
    b = (tl.program_id(0) // (splits * H)).to(tl.int64)
    g = tl.arange(0, BG)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BV)
    row = b * (H * G) + h * G + g
    bq = tl.load(q + row[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.full([BG], float("-inf"), tl.float32)
    weight = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BV], tl.float32)
    mask += b * mask_stride
    low, high = _visible_range(mask, split * chunk, tl.minimum((split + 1) * chunk, L), BM)
    for start in range(low // BL * BL, high, BL):
        slot = start + tl.arange(0, BL)
        inside = slot < high
        at = (b * H + h) * L + slot
        visible = tl.load(mask + slot, mask=inside, other=0) != 0
        bk = tl.load(k + at[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        bv = tl.load(v + at[:, None] * V + dv[None, :], mask=inside[:, None] & (dv < V)[None, :], other=0.0)
        bv = tl.where(visible[:, None], bv, 0.0)
        products = tl.dot(bq, bk, input_precision="ieee")
        products = tl.where(visible[None, :], products * (scale * LOG2_E), float("-inf"))
        new = tl.maximum(largest, tl.max(products, 1))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp2(largest - anchor)
        e = tl.exp2(products - anchor[:, None])
        weight = weight * old + tl.sum(e, 1)
        acc = tl.dot(e.to(bv.dtype), bv, acc * old[:, None], input_precision="ieee")
        largest = new
    at = row * splits + split
    tl.store(part + at[:, None] * V + dv[None, :], acc, mask=(g < G)[:, None] & (dv < V)[None, :])
    tl.store(top + at, largest, mask=g < G)
    tl.store(total + at, weight, mask=g < G)


@triton.jit
def _visible_range(mask, first, end, BM: tl.constexpr):
    """First visible slot of first .. end - 1, and the one after the last; nothing between them where none is."""
    low, high = end, first
    for start in range(first, end, BM):
        slot = start + tl.arange(0, BM)
        visible = tl.load(mask + slot, mask=slot < end, other=0) != 0
        low = tl.minimum(low, tl.min(tl.where(visible, slot, end), 0))
        high = tl.maximum(high, tl.max(tl.where(visible, slot + 1, first), 0))
    return low, high


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(part, top, total, o, splits, V: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr):
    """o = (sum_s w_s part_s) / (sum_s w_s total_s), w_s = exp2(top_s - top), over the splits s of one query.

    Grid (B * Hq). Bytes of a query: 4 (V + 2) of each split, and 2 V. Tiles: all splits, 64 at most, since both sums
    need the largest top."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    dv = tl.arange(0, BV)
    largest = tl.load(top + row * splits + s, mask=s < splits, other=float("-inf"))
    factor = tl.exp2(largest - tl.max(largest, 0))
    weight = tl.load(total + row * splits + s, mask=s < splits, other=0.0) * factor
    inside = (s < splits)[:, None] & (dv < V)[None, :]
    parts = tl.load(part + (row * splits + s)[:, None] * V + dv[None, :], mask=inside, other=0.0)
    out = tl.sum(parts * factor[:, None], 0) / tl.sum(weight, 0)
    tl.store(o + row * V + dv, out.to(o.dtype.element_ty), mask=dv < V)
