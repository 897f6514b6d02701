"""Last kernel of the backward pass: gradients of q, k, the log decays and the gates, chunk by chunk.

With X = do S^T, Y = v dS^T and P, R the products of dA = do v^T with the decayed keys and queries:
dq = 2^b (P + X), dk = 2^-b R + 2^(total-b) Y, and the decay of token i is the sum of what crosses it:
d log a_i = sum over j >= i of (q dq - k dk within the chunk) + sum over j < i of k dk (through the state)
+ rows of S * dS when the state passes through. q dq and k dk use the same rounded operands, so that what should cancel
does; nothing is summed over more than one chunk, so errors do not grow with length.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import chunk_slots
from sse_convert.kernels.triton.tiles import gather_rows
from sse_convert.kernels.triton.tiles import key_norm
from sse_convert.kernels.triton.tiles import level_masks
from sse_convert.kernels.triton.tiles import log2_decay
from sse_convert.kernels.triton.tiles import map_keys
from sse_convert.kernels.triton.tiles import matmul
from sse_convert.kernels.triton.tiles import of_segment
from sse_convert.kernels.triton.tiles import scatter_rows
from sse_convert.kernels.triton.tiles import slot_weight
from sse_convert.kernels.triton.tiles import sum_rows
from sse_convert.kernels.triton.tiles import unmap_keys
from sse_convert.kernels.triton.tiles import within_segments


@triton.jit(do_not_specialize=["scale", "normalizer", "T", "S", "num_shared", "slots"])
def finish_kernel(
    q_sparse, k_sparse, g_sparse, q_shared, k_shared, g_shared, k_scale, gate, values, values_shared, do,
    token, out, segment, head, tail, decay, strong, states, dstates, value_dots,
    dq, dk, dg, dgate, dk_scale,
    scale, normalizer, T, S, num_shared, slots,
    P: tl.constexpr, VALUE_P: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, READ_TOP_K: tl.constexpr,
    WRITE_GATE: tl.constexpr, READ_GATE: tl.constexpr, K_MAP: tl.constexpr, FROM_LOGITS: tl.constexpr,
    HAS_SCALE: tl.constexpr, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DOTS: tl.constexpr, C: tl.constexpr,
    IEEE: tl.constexpr, STRONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, H, blocks of BD of D). Outputs have one row per slot: dq [slots, Hq, D], dk and dg [slots, H, D],
    dgate [blocks, slots, H]; dk_scale is [blocks, chunks, H]. value_dots [DOTS, slots, H] holds v dv of each slot,
    which equals k dk. One launch with STRONG for the chunks with strong decays, one without for the others."""
    low = states.dtype.element_ty
    c = tl.program_id(0)
    h = tl.program_id(1)
    here = c.to(tl.int64) * H + h
    i = tl.arange(0, C)
    if tl.load(token + c * C) < 0:
        return
    if (tl.load(strong + here) != 0) != STRONG:
        return
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    inside = (d < D)[None, :]
    q_base = tl.where(c < num_shared, q_shared, q_sparse)
    k_base = tl.where(c < num_shared, k_shared, k_sparse)
    g_base = tl.where(c < num_shared, g_shared, g_sparse)
    v_base = values
    if VALUE_P > 0:
        v_base = tl.where(c < num_shared, values_shared, values)
    state_tile = here * D * V + d[None, :] * V

    tok, rank, ok = chunk_slots(token, out, c, T, C)
    write = slot_weight(gate, tok, rank, ok, K, TOP_K, WRITE_GATE)
    read = slot_weight(gate, tok, rank, ok, K, READ_TOP_K, READ_GATE)
    written = ok & ((rank < TOP_K) | (rank == K))
    raw_g = gather_rows(g_base, token, segment, c, h, d, S, num_shared, 1, H, D, C)
    g = tl.where(written[:, None] & inside, log2_decay(raw_g, normalizer, FROM_LOGITS), 0.0)
    b = sum_rows(i[:, None] >= i[None, :], g, IEEE)
    total = tl.sum(g, 0)
    key_scale = tl.load(k_scale + h).to(tl.float32) if HAS_SCALE else 1.0
    whole = tl.arange(0, ROW)
    norm = key_norm(gather_rows(k_base, token, segment, c, h, whole, S, num_shared, P, H, D, C), whole, key_scale, D,
                    K_MAP)  # fmt: skip
    raw_k = gather_rows(k_base, token, segment, c, h, d, S, num_shared, P, H, D, C)
    phi = tl.where(inside, map_keys(raw_k, norm, key_scale, K_MAP), 0.0)
    k = phi * write[:, None]

    inner = tl.zeros([C, BD], tl.float32)
    within = tl.zeros([C, BD], tl.float32)
    dread = tl.zeros([C], tl.float32)
    for n in range(G):
        hq = h * G + n
        da = tl.zeros([C, C], tl.float32)
        da_t = tl.zeros([C, C], tl.float32)
        through = tl.zeros([C, BD], tl.float32)
        for begin in tl.range(0, V, BV, num_stages=STAGES):
            v = begin + tl.arange(0, BV)
            bv = gather_rows(v_base, token, segment, c, h, v, S, num_shared, VALUE_P, H, V, C)
            bo = gather_rows(do, token, segment, c, hq, v, S, num_shared, 1, H * G, V, C)
            s = tl.load(states + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
            da = matmul(bo, tl.trans(bv), da, IEEE)
            da_t = matmul(bv, tl.trans(bo), da_t, IEEE)
            through = matmul(bo, s, through, IEEE)
        da = within_segments(tl.where(i[:, None] >= i[None, :], da, 0.0), segment, c, PACKED, C).to(low)
        da_t = within_segments(tl.where(i[:, None] <= i[None, :], da_t, 0.0), segment, c, PACKED, C).to(low)
        through = of_segment(through, segment, c, tl.load(head + c), PACKED, C)
        x = gather_rows(q_base, token, segment, c, hq, d, S, num_shared, P, H * G, D, C).to(tl.float32) * scale
        if STRONG:
            q = x * read[:, None]
            dq_hat = through * tl.exp2(b)
            inner += q * dq_hat
            own = tl.sum(tl.where(i[:, None] == i[None, :], da.to(tl.float32), 0.0), 1)[:, None]
            dq_hat += own * k
            within += own * q
            for level in range(6):
                joins, pairs = level_masks(i, level)
                factor = tl.exp2(sum_rows(joins, g, IEEE))
                q_in = (q * factor).to(low)
                k_in = (k * factor).to(low)
                to_q = matmul(tl.where(pairs, da, 0.0), k_in, tl.zeros([C, BD], tl.float32), IEEE)
                to_k = matmul(tl.where(tl.trans(pairs), da_t, 0.0), q_in, tl.zeros([C, BD], tl.float32), IEEE)
                dq_hat += to_q * factor
                within += to_k * factor
                inner += q_in.to(tl.float32) * to_q - k_in.to(tl.float32) * to_k
        else:
            q_in = (x * (read[:, None] * tl.exp2(b))).to(low)
            through = matmul(da, (k * tl.exp2(-b)).to(low), through, IEEE)
            within = matmul(da_t, q_in, within, IEEE)
            inner += q_in.to(tl.float32) * through
            dq_hat = through * tl.exp2(b)
        dread += tl.sum(x * dq_hat, 1)
        scatter_rows(dq, dq_hat * (read * scale)[:, None], token, out, c, hq, d, H * G, D, C)
    if not STRONG:
        inner -= (k * tl.exp2(-b)).to(low).to(tl.float32) * within
        within = within * tl.exp2(-b)
    db = sum_rows(i[:, None] <= i[None, :], inner, IEEE)

    later = tl.zeros([C, BD], tl.float32)
    crossing = tl.zeros([BD], tl.float32)
    for begin in tl.range(0, V, BV, num_stages=STAGES):
        v = begin + tl.arange(0, BV)
        s = tl.load(states + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
        ds = tl.load(dstates + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
        bv = gather_rows(v_base, token, segment, c, h, v, S, num_shared, VALUE_P, H, V, C)
        later = matmul(bv, ds, later, IEEE)
        crossing += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
    crossing = crossing * tl.load(decay + here * D + d, mask=d < D, other=0.0)
    later = of_segment(later * tl.exp2(total[None, :] - b), segment, c, tl.load(tail + c), PACKED, C)
    db += sum_rows(i[:, None] > i[None, :], k * later, IEEE) + crossing[None, :]
    if FROM_LOGITS:
        db = db * tl.sigmoid(-raw_g.to(tl.float32)) / normalizer
    scatter_rows(dg, tl.where(written[:, None], db, 0.0), token, out, c, h, d, H, D, C)

    dk_hat = within + later
    at = c * C + i
    real = tl.load(token + at) >= 0
    slot = tl.where(real, tl.load(out + at), 0)
    if WRITE_GATE or READ_GATE:
        both = tl.zeros([C], tl.float32)
        if READ_GATE:
            both += tl.where(rank < READ_TOP_K, dread, 0.0)
        if WRITE_GATE:
            both += tl.where(rank < TOP_K, tl.sum(phi * dk_hat, 1), 0.0)
        tl.store(dgate + (tl.program_id(2).to(tl.int64) * slots + slot) * H + h, both, mask=real)
    dot = tl.zeros([C], tl.float32)
    if K_MAP == "softmax":
        for part in tl.static_range(DOTS):
            dot += tl.load(value_dots + (part * slots.to(tl.int64) + slot) * H + h, mask=real, other=0.0)
    dk_raw = unmap_keys(dk_hat * write[:, None], phi, dot, raw_k, key_scale, K_MAP)
    scatter_rows(dk, dk_raw * key_scale, token, out, c, h, d, H, D, C)
    if HAS_SCALE:
        scaled = tl.sum(tl.sum(tl.where(real[:, None] & inside, dk_raw * raw_k.to(tl.float32), 0.0), 1), 0)
        tl.store(dk_scale + (tl.program_id(2) * tl.num_programs(0) + c) * H + h, scaled)
