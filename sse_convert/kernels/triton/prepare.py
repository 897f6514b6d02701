"""First kernel of the forward pass: everything that happens inside one chunk before states are involved.

Per chunk and query head it writes, in slot order, q decayed from the chunk's start, phi(k) decayed to the chunk's end,
and the masked products A = q k^T with the decay between the two tokens. Later kernels are plain matrix products.

Decays factorise around the chunk's first row while the chunk decays by less than FAST_BITS; a chunk with stronger ones
goes through halving levels, whose factors never exceed 1. A row depends on no later row either way.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import FAST_BITS
from sse_convert.kernels.triton.tiles import chunk_slots
from sse_convert.kernels.triton.tiles import gather_rows
from sse_convert.kernels.triton.tiles import key_norm
from sse_convert.kernels.triton.tiles import level_masks
from sse_convert.kernels.triton.tiles import log2_decay
from sse_convert.kernels.triton.tiles import map_keys
from sse_convert.kernels.triton.tiles import matmul
from sse_convert.kernels.triton.tiles import of_segment
from sse_convert.kernels.triton.tiles import slot_weight
from sse_convert.kernels.triton.tiles import sum_rows
from sse_convert.kernels.triton.tiles import within_segments


@triton.jit(do_not_specialize=["scale", "normalizer", "T", "S", "num_shared"])
def prepare_kernel(
    q_sparse, k_sparse, g_sparse, q_shared, k_shared, g_shared, k_scale, gate,
    token, out, segment, head, tail,
    qd, kd, products, decay, strong,
    scale, normalizer, T, S, num_shared,
    P: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, READ_TOP_K: tl.constexpr,
    WRITE_GATE: tl.constexpr, READ_GATE: tl.constexpr, K_MAP: tl.constexpr, FROM_LOGITS: tl.constexpr,
    HAS_SCALE: tl.constexpr, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, BD: tl.constexpr, THIN: tl.constexpr, C: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, query heads). Works through D in blocks of BD, of THIN where decays are strong; ROW >= D."""
    c = tl.program_id(0)
    hq = tl.program_id(1)
    h = hq // G
    i = tl.arange(0, C)
    if tl.load(token + c * C) < 0:
        return
    entering = tl.load(head + c)
    leaving = tl.load(tail + c)
    through = (entering == leaving) & (entering >= 0)
    tok, rank, ok = chunk_slots(token, out, c, T, C)
    write = slot_weight(gate, tok, rank, ok, K, TOP_K, WRITE_GATE)
    read = slot_weight(gate, tok, rank, ok, K, READ_TOP_K, READ_GATE) * scale
    written = ok & ((rank < TOP_K) | (rank == K))
    q_base = tl.where(c < num_shared, q_shared, q_sparse)
    k_base = tl.where(c < num_shared, k_shared, k_sparse)
    g_base = tl.where(c < num_shared, g_shared, g_sparse)
    key_scale = tl.load(k_scale + h).to(tl.float32) if HAS_SCALE else 1.0
    whole = tl.arange(0, ROW)
    norm = key_norm(gather_rows(k_base, token, segment, c, h, whole, S, num_shared, P, H, D, C), whole, key_scale, D,
                    K_MAP)  # fmt: skip
    tile = (c.to(tl.int64) * (H * G) + hq) * C
    here = c.to(tl.int64) * H + h

    acc = tl.zeros([C, C], tl.float32)
    lowest = 0.0
    for begin in tl.static_range(0, D, BD):
        d = begin + tl.arange(0, BD)
        inside = (d < D)[None, :]
        raw = gather_rows(g_base, token, segment, c, h, d, S, num_shared, 1, H, D, C)
        g = tl.where(written[:, None] & inside, log2_decay(raw, normalizer, FROM_LOGITS), 0.0)
        b = sum_rows(i[:, None] >= i[None, :], g, IEEE)
        total = tl.sum(g, 0)
        lowest = tl.minimum(lowest, tl.min(total, 0))
        raw_k = gather_rows(k_base, token, segment, c, h, d, S, num_shared, P, H, D, C)
        k = tl.where(inside, map_keys(raw_k, norm, key_scale, K_MAP) * write[:, None], 0.0)
        x = gather_rows(q_base, token, segment, c, hq, d, S, num_shared, P, H * G, D, C).to(tl.float32) * read[:, None]
        decayed = x * tl.exp2(b)
        acc = matmul(decayed, tl.trans(k * tl.exp2(-b)), acc, IEEE)
        shown = of_segment(decayed, segment, c, entering, PACKED, C).to(qd.dtype.element_ty)
        tl.store(qd + (tile + i[:, None]) * D + d[None, :], shown, mask=inside)
        if hq % G == 0:
            kept = of_segment(k * tl.exp2(total[None, :] - b), segment, c, leaving, PACKED, C)
            tl.store(kd + (here * C + i[:, None]) * D + d[None, :], kept.to(kd.dtype.element_ty), mask=inside)
            tl.store(decay + here * D + d, tl.where(through, tl.exp2(total), 0.0), mask=d < D)
    if hq % G == 0:
        tl.store(strong + here, (lowest <= -FAST_BITS).to(tl.int32))
    if lowest <= -FAST_BITS:
        acc = tl.zeros([C, C], tl.float32)
        for block in range((D + THIN - 1) // THIN):
            thin = block * THIN + tl.arange(0, THIN)
            thin_g = gather_rows(g_base, token, segment, c, h, thin, S, num_shared, 1, H, D, C)
            thin_k = gather_rows(k_base, token, segment, c, h, thin, S, num_shared, P, H, D, C)
            thin_q = gather_rows(q_base, token, segment, c, hq, thin, S, num_shared, P, H * G, D, C)
            real = (thin < D)[None, :]
            g_part = tl.where(written[:, None] & real, log2_decay(thin_g, normalizer, FROM_LOGITS), 0.0)
            k_part = tl.where(real, map_keys(thin_k, norm, key_scale, K_MAP) * write[:, None], 0.0)
            acc = strong_products(acc, thin_q.to(tl.float32) * read[:, None], k_part, g_part, C, IEEE)
    acc = within_segments(tl.where(i[:, None] >= i[None, :], acc, 0.0), segment, c, PACKED, C)
    tl.store(products + (tile + i[:, None]) * C + i[None, :], acc.to(products.dtype.element_ty))


@triton.jit
def strong_products(acc, q, k, g, C: tl.constexpr, IEEE: tl.constexpr):
    """acc + the products of some channels [C, THIN] whose decays may be arbitrarily strong."""
    i = tl.arange(0, C)
    acc += tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(6):
        joins, pairs = level_masks(i, level)
        factor = tl.exp2(sum_rows(joins, g, IEEE))
        part = matmul(q * factor, tl.trans(k * factor), tl.zeros([C, C], tl.float32), IEEE)
        acc += tl.where(pairs, part, 0.0)
    return acc
