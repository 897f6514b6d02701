"""First kernels of the forward pass: everything that happens inside one chunk before states are involved.

With b the cumulative log decays of a chunk's slots (base 2), they write in slot order, for later matrix products,

    qd_i = q_i 2^b_i     kd_i = phi(k_i) 2^(b_last - b_i)     A_ij = q_i phi(k_j) 2^(b_i - b_j) for j <= i

Decays factorise around the chunk's first row up to the row where they exceed FAST_BITS; the rows from there on go
through halving levels, whose factors never exceed 1. A row depends on no later row either way.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import (
    FAST_BITS,
    gather_slots,
    key_norm,
    level_masks,
    load_source,
    log2_decay,
    map_keys,
    matmul,
    of_segment,
    per_head,
    slot_ranks,
    slot_weight,
    source_rows,
    sum_rows,
    within_segments,
)


@triton.jit(do_not_specialize=["scale", "normalizer", "T", "S", "num_shared"])
def prepare_kernel(
    sources, slots, qt, kt, packed_q, packed_k, falls, products, decay, full, norms, strong,
    scale, normalizer, T, S, num_shared,
    shape: tl.constexpr, mapping: tl.constexpr, Q: tl.constexpr, ROW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """qd, kd and A of one chunk and Q query heads. packed_q and packed_k are qt and kt without the rows of segments
    that do not read (leave) the chunk's state, if segments share chunks. ROW >= D.

    Grid (chunks * query heads / Q). Bytes of a slot and head, in bfloat16: 2 D G (q) + 2 D (k) + 4 D (decays, float32),
    then 2 D G (qd) + 2 C G (A) + 2 D (kd) and, for a backward pass, 2 D (falls). Tiles: half of D at a time, loaded a
    step ahead; exponents are float32, so 64 x 64 of them take 32 registers of 4 warps. Two query heads of one state
    share its keys and decays, as 128 rows of one product, on 8 warps."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    IEEE: tl.constexpr = shape.IEEE
    P: tl.constexpr = mapping.P
    K_MAP: tl.constexpr = mapping.K_MAP
    c = tl.program_id(0) // (H * G // Q)
    hq = tl.program_id(0) % (H * G // Q) * Q
    h = hq // G
    i = tl.arange(0, C)
    r = tl.arange(0, Q * C)
    if tl.load(slots.token + c * C) < 0:
        tl.store(strong + c.to(tl.int64) * H + h, 0)
        return
    entering = tl.load(slots.head + c)
    leaving = tl.load(slots.tail + c)
    through = (entering == leaving) & (entering >= 0)
    at_i = c * C + i
    at_r = c * C + r % C
    tok, rank, ok = slot_ranks(slots.token, slots.out, at_i, T)
    write = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.WRITE_GATE)
    written = ok
    if Q > 1:
        tok, rank, ok = slot_ranks(slots.token, slots.out, at_r, T)
    read = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.READ_GATE) * scale
    q_base = tl.where(c < num_shared, sources.shared_q, sources.q)
    k_base = tl.where(c < num_shared, sources.shared_k, sources.k)
    g_base = tl.where(c < num_shared, sources.shared_g, sources.g)
    key_scale = tl.load(sources.k_scale + h).to(tl.float32) if sources.k_scale is not None else 1.0
    g_row = tl.load(slots.token + at_i)
    k_row = source_rows(slots.token, slots.segment, at_i, c, S, num_shared, P)
    q_row = source_rows(slots.token, slots.segment, at_r, c, S, num_shared, P)
    q_head = hq if Q == 1 else hq + r // C
    whole = tl.arange(0, ROW)
    norm = key_norm(load_source(k_base, k_row, h, whole, H, D), whole, key_scale, D, K_MAP)
    tile = (c.to(tl.int64) * (H * G) + hq) * C
    here = c.to(tl.int64) * H + h
    first_query = hq % G == 0

    acc = tl.zeros([Q * C, C], tl.float32)
    lowest = tl.zeros([1], tl.float32)
    lane = tl.arange(0, BD)
    raw = load_source(g_base, g_row, h, lane, H, D)
    raw_k = load_source(k_base, k_row, h, lane, H, D)
    raw_q = load_source(q_base, q_row, q_head, lane, H * G, D)
    for begin in tl.static_range(0, D, BD):
        d = begin + lane
        inside = (d < D)[None, :]
        this, this_k, this_q = raw, raw_k, raw_q
        if begin + BD < D:
            raw = load_source(g_base, g_row, h, d + BD, H, D)
            raw_k = load_source(k_base, k_row, h, d + BD, H, D)
            raw_q = load_source(q_base, q_row, q_head, d + BD, H * G, D)
        q_at = (tile + r[:, None]) * D + d[None, :]
        k_at = (here * C + i[:, None]) * D + d[None, :]
        g = tl.where(written[:, None] & inside, log2_decay(this, normalizer), 0.0)
        b = sum_rows(i[:, None] >= i[None, :], g, IEEE)
        total = tl.sum(tl.where(i[:, None] == C - 1, b, 0.0), 0)
        lowest = tl.minimum(lowest, tl.min(total[None, :], 1))  # of a vector, triton 3.7 cannot for sm_100
        fall = tl.exp2(b)
        k = tl.where(inside, map_keys(this_k, norm, key_scale, K_MAP) * write[:, None], 0.0)
        raised = k * tl.exp2(-b)
        decayed = this_q.to(tl.float32) * read[:, None] * per_head(fall, Q, C)
        acc = matmul(decayed, tl.trans(raised), acc, IEEE)
        tl.store(qt + q_at, decayed.to(qt.dtype.element_ty), mask=inside)
        if mapping.PACKED:
            shown = of_segment(decayed, slots.segment, at_r, entering)
            tl.store(packed_q + q_at, shown.to(packed_q.dtype.element_ty), mask=inside)
        if first_query:
            rest = sum_rows(i[:, None] < i[None, :], g, IEEE) if IEEE else total[None, :] - b
            kept = k * tl.exp2(rest)
            tl.store(kt + k_at, kept.to(kt.dtype.element_ty), mask=inside)
            if falls is not None:
                tl.store(falls + k_at, fall.to(falls.dtype.element_ty), mask=inside)
            if mapping.PACKED:
                kept = of_segment(kept, slots.segment, at_i, leaving)
                tl.store(packed_k + k_at, kept.to(packed_k.dtype.element_ty), mask=inside)
            tl.store(full + here * D + d, tl.exp2(total), mask=d < D)
            tl.store(decay + here * D + d, tl.where(through, tl.exp2(total), 0.0), mask=d < D)
    if first_query:
        tl.store(strong + here + tl.arange(0, 1), (lowest <= 1 - FAST_BITS).to(tl.int32))
        if K_MAP == "softmax":
            tl.store(norms + here * C + i, norm)
    acc = tl.where((r % C)[:, None] >= i[None, :], acc, 0.0)
    if mapping.PACKED:
        acc = within_segments(acc, slots.segment, at_r, at_i)
    tl.store(products + (tile + r[:, None]) * C + i[None, :], acc.to(products.dtype.element_ty))


@triton.jit(do_not_specialize=["scale", "normalizer", "T", "S", "num_shared", "tasks"])
def strong_products_kernel(
    sources, slots, norms, strong, products,
    scale, normalizer, T, S, num_shared, tasks,
    shape: tl.constexpr, mapping: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A of the rows where decays are strong, in halving levels. A few programs look through the flags of all tasks.

    Grid (programs), each of which takes every so many of the chunks * query heads. Bytes of a task: 4 (its flag); of a
    slot where it is set: 2 D (q) + 2 D (k) + 4 D (decays) + 2 C (A). Tiles: 32 channels at a time, since the factors of
    a level and the sums of all levels, 64 x 64 in float32, are in registers beside them."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    IEEE: tl.constexpr = shape.IEEE
    P: tl.constexpr = mapping.P
    K_MAP: tl.constexpr = mapping.K_MAP
    i = tl.arange(0, C)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        c = task // (H * G)
        hq = task % (H * G)
        h = hq // G
        here = tl.cast(c, tl.int64) * H + h
        if tl.load(strong + here) != 0:
            tok, rank, ok = slot_ranks(slots.token, slots.out, c * C + i, T)
            write = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.WRITE_GATE)
            read = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.READ_GATE) * scale
            written = ok
            q_base = tl.where(c < num_shared, sources.shared_q, sources.q)
            k_base = tl.where(c < num_shared, sources.shared_k, sources.k)
            g_base = tl.where(c < num_shared, sources.shared_g, sources.g)
            key_scale = tl.load(sources.k_scale + h).to(tl.float32) if sources.k_scale is not None else 1.0
            norm = tl.load(norms + here * C + i) if K_MAP == "softmax" else tl.zeros([C], tl.float32)
            acc = tl.zeros([C, C], tl.float32)
            lowest = tl.zeros([C], tl.float32)
            for begin in range(0, D, BD):
                d = begin + tl.arange(0, BD)
                inside = (d < D)[None, :]
                raw = gather_slots(g_base, slots.token, slots.segment, c, h, d, S, num_shared, 1, H, D, C)
                g = tl.where(written[:, None] & inside, log2_decay(raw, normalizer), 0.0)
                lowest = tl.minimum(lowest, tl.min(sum_rows(i[:, None] >= i[None, :], g, IEEE), 1))
                raw_k = gather_slots(k_base, slots.token, slots.segment, c, h, d, S, num_shared, P, H, D, C)
                k = tl.where(inside, map_keys(raw_k, norm, key_scale, K_MAP) * write[:, None], 0.0)
                x = (
                    gather_slots(q_base, slots.token, slots.segment, c, hq, d, S, num_shared, P, H * G, D, C).to(
                        tl.float32
                    )
                    * read[:, None]
                )
                acc += tl.where(i[:, None] == i[None, :], tl.sum(x * k, 1)[:, None], 0.0)
                for level in range(6):
                    joins, pairs = level_masks(i, level)
                    factor = tl.exp2(sum_rows(joins, g, IEEE))
                    part = matmul(x * factor, tl.trans(k * factor), tl.zeros([C, C], tl.float32), IEEE)
                    acc += tl.where(pairs, part, 0.0)
            if mapping.PACKED:
                acc = within_segments(acc, slots.segment, c * C + i, c * C + i)
            tile = (tl.cast(c, tl.int64) * (H * G) + hq) * C
            slow = (lowest <= -FAST_BITS)[:, None] & (i[None, :] >= 0)
            tl.store(products + (tile + i[:, None]) * C + i[None, :], acc.to(products.dtype.element_ty), mask=slow)
