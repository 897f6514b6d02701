"""Last kernel of the backward pass: gradients of q, k, the log decays and the gates, chunk by chunk.

With X = do S^T, Y = v dS^T and P, R the products of dA = do v^T with the decayed keys and queries: dq = 2^b (P + X),
dk = 2^-b R + 2^(total-b) Y, and the decay of token i is the sum of what crosses it: d log a_i = sum over j >= i of (q
dq - k dk within the chunk) + sum over j < i of k dk (through the state) + rows of S * dS when the state passes
through (the second sum is taken as the whole less the rest). q dq and k dk use the same rounded operands, so that
what should cancel does; nothing is summed over more than one chunk, so errors do not grow with length. Keys are read as
they decayed to the chunk's end, so 2^total comes out of the sums and is never divided out of a key.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import (
    LOG2_E,
    inverse,
    level_masks,
    load_source,
    log2_decay,
    map_keys,
    matmul,
    of_segment,
    per_head,
    scatter_slots,
    slot_ranks,
    slot_weight,
    source_rows,
    store_rows,
    sum_heads,
    sum_rows,
    unmap_keys,
    within_segments,
)

_NUMBERS = ["scale", "normalizer", "T", "S", "num_shared", "num_slots", "first_group", "group_chunks", "places"]


@triton.jit(do_not_specialize=_NUMBERS[:-1])
def finish_kernel(
    sources, do, slots, qt, kt, falls, decay, full, norms, strong, states, dstates, value_dots, grads,
    scale, normalizer, T, S, num_shared, num_slots, first_group, group_chunks,
    shape: tl.constexpr, mapping: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DOTS: tl.constexpr,
    PARTS: tl.constexpr, BY_SLOT: tl.constexpr, STRICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program for each chunk of some groups, H, and block of BD of D; chunks with strong decays are left out.

    With BY_SLOT each slot has a value of its own, with STRICT a do of its own, and it does not read its own token.

    grads are the results, one row per slot: dq [slots, Hq, D], dk and dg [slots, H, D], and if wanted dgate [blocks,
    slots, H] and dk_scale [chunks, H, PARTS]. value_dots [DOTS, slots, H] holds v dv of each slot, which equals k dk.
    states and dstates hold group_chunks places for each of the groups.

    Grid (chunks * H * blocks of D); a program goes through V once for all Q = G query heads of its state, or for each Q
    of them and once more. Bytes of a slot and head, in bfloat16: 2 (D + V) G (q, do) + 4 D (k, falls) + 2 V (v) + 4 D V
    / C (S, dS), 2 D (gate logits) and, but for keys that are mapped already, 2 D (keys); then 2 D G (dq) and 4 D (dk,
    dg; 6 D where decays are float32). Tiles: with one or two query heads a quarter of D at a time, so that four
    programs (three, with two heads as 128 rows) share a multiprocessor; what all programs of a chunk read comes from
    the L2 cache but once. With more heads half of D, in a pass for each. dA^T is dA through shared memory, not a second
    product; storing dA in `chunk_bwd_dv` costs more there than it saves here, and rounds it."""
    H: tl.constexpr = shape.H
    BLOCKS: tl.constexpr = (shape.D + BD - 1) // BD
    place = tl.program_id(0) // (H * BLOCKS)
    h = tl.program_id(0) // BLOCKS % H
    part = tl.program_id(0) % BLOCKS
    group = first_group + place // group_chunks
    c = tl.load(slots.group_first + group) + place % group_chunks
    if c >= tl.load(slots.group_end + group):
        return
    if tl.load(strong + c.to(tl.int64) * H + h) != 0:
        return
    finish_chunk(
        sources, do, slots, qt, kt, falls, decay, full, norms, states, dstates, value_dots, grads,
        scale, normalizer, T, S, num_shared, num_slots, place, h, part, c,
        shape, mapping, Q, BD, BV, DOTS, PARTS, BY_SLOT, STRICT, False, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def finish_strong_kernel(
    sources, do, slots, qt, kt, falls, decay, full, norms, strong, states, dstates, value_dots, grads,
    scale, normalizer, T, S, num_shared, num_slots, first_group, group_chunks, places,
    shape: tl.constexpr, mapping: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DOTS: tl.constexpr,
    PARTS: tl.constexpr, BY_SLOT: tl.constexpr, STRICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `finish_kernel`, for the chunks with strong decays: a few programs look for them in all places.

    Grid (programs), each of which takes every so many of the places * H. Bytes of a place: 4 (its flag), and where it
    is set those of `finish_kernel`. Tiles: a quarter of D and of V at a time, since the factors of a halving level,
    made anew for queries and keys, are in registers beside the sums."""
    H: tl.constexpr = shape.H
    for task in range(tl.program_id(0), places * H, tl.num_programs(0)):
        place = task // H
        h = task % H
        group = first_group + place // group_chunks
        c = tl.load(slots.group_first + group) + place % group_chunks
        found = c < tl.load(slots.group_end + group)
        if found:
            found = tl.load(strong + tl.cast(c, tl.int64) * H + h) != 0
        if found:
            for part in range((shape.D + BD - 1) // BD):
                finish_chunk(
                    sources, do, slots, qt, kt, falls, decay, full, norms, states, dstates, value_dots, grads,
                    scale, normalizer, T, S, num_shared, num_slots, place, h, part, c,
                    shape, mapping, Q, BD, BV, DOTS, PARTS, BY_SLOT, STRICT, True, STAGES,
                )  # fmt: skip


@triton.jit
def finish_chunk(
    sources, do, slots, qt, kt, falls, decay, full, norms, states, dstates, value_dots, grads,
    scale, normalizer, T, S, num_shared, num_slots, place, h, part, c,
    shape: tl.constexpr, mapping: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DOTS: tl.constexpr,
    PARTS: tl.constexpr, BY_SLOT: tl.constexpr, STRICT: tl.constexpr, STRONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of one head of one chunk."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    IEEE: tl.constexpr = shape.IEEE
    P: tl.constexpr = mapping.P
    VALUE_P: tl.constexpr = shape.VALUE_P
    K_MAP: tl.constexpr = mapping.K_MAP
    dq, dk, dg, dgate, dk_scale = grads
    here = tl.cast(c, tl.int64) * H + h
    low = states.dtype.element_ty
    i = tl.arange(0, C)
    r = tl.arange(0, Q * C)
    at_i = c * C + i
    at_r = c * C + r % C
    d = part * BD + tl.arange(0, BD)
    inside = (d < D)[None, :]
    q_base = tl.where(c < num_shared, sources.shared_q, sources.q)
    k_base = tl.where(c < num_shared, sources.shared_k, sources.k)
    g_base = tl.where(c < num_shared, sources.shared_g, sources.g)
    v_base = sources.v
    if VALUE_P > 0:
        v_base = tl.where(c < num_shared, sources.shared_v, sources.v)
    v_row = source_rows(slots.out if BY_SLOT else slots.token, slots.segment, at_i, c, S, num_shared, VALUE_P)
    do_row = tl.load((slots.out if STRICT else slots.token) + at_r)
    dq_row = tl.load(slots.out + at_r)
    state_tile = (tl.cast(place, tl.int64) * H + h) * D * V + d[None, :] * V
    key_tile = (here * C + i[:, None]) * D + d[None, :]
    tok, rank, ok = slot_ranks(slots.token, slots.out, at_i, T)
    write = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.WRITE_GATE)
    written = ok
    if Q > 1:
        tok, rank, ok = slot_ranks(slots.token, slots.out, at_r, T)
    read = slot_weight(sources.gate, tok, rank, ok, mapping.K, mapping.READ_GATE)
    key_scale = tl.load(sources.k_scale + h).to(tl.float32) if sources.k_scale is not None else 1.0
    norm = tl.load(norms + here * C + i) if K_MAP == "softmax" else tl.zeros([C], tl.float32)
    grown = tl.load(full + here * D + d, mask=d < D, other=1.0)
    shrunk = inverse(grown)
    if STRONG:
        raw_g = load_source(g_base, tl.load(slots.token + at_i), h, d, H, D)
        g = tl.where(written[:, None] & inside, log2_decay(raw_g, normalizer), 0.0)
        b = sum_rows(i[:, None] >= i[None, :], g, IEEE)
        fall = tl.exp2(b)
        raw_k = load_source(k_base, source_rows(slots.token, slots.segment, at_i, c, S, num_shared, P), h, d, H, D)
        k_in = tl.where(inside, map_keys(raw_k, norm, key_scale, K_MAP) * write[:, None], 0.0)

    inner = tl.zeros([C, BD], tl.float32)
    within = tl.zeros([C, BD], tl.float32)
    dread = tl.zeros([Q * C], tl.float32)
    later = tl.zeros([C, BD], tl.float32)
    crossing = tl.zeros([BD], tl.float32)
    for n in range(0, G, Q):
        hq = h * G + n
        head = hq + r // C
        if STRONG:
            q_row = source_rows(slots.token, slots.segment, at_r, c, S, num_shared, P)
            q_in = load_source(q_base, q_row, head, d, H * G, D).to(tl.float32) * (read * scale)[:, None]
        da = tl.zeros([Q * C, C], tl.float32)
        through = tl.zeros([Q * C, BD], tl.float32)
        for begin in tl.range(0, V, BV, num_stages=STAGES):
            v = begin + tl.arange(0, BV)
            bv = load_source(v_base, v_row, h, v, H, V)
            bo = load_source(do, do_row, head, v, H * G, V)
            s = tl.load(states + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
            da = matmul(bo, tl.trans(bv), da, IEEE)
            through = matmul(bo, s, through, IEEE)
            if Q == G:
                ds = tl.load(dstates + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
                later = matmul(bv, ds, later, IEEE)
                crossing += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
        da = tl.where((r % C)[:, None] > i[None, :] - (0 if STRICT else 1), da, 0.0)
        if mapping.PACKED:
            da = within_segments(da, slots.segment, at_r, at_i)
            through = of_segment(through, slots.segment, at_r, tl.load(slots.head + c))
        else:
            through = tl.where(tl.load(slots.head + c) >= 0, through, 0.0)
        if STRONG:
            dq_hat = through * fall
            pulled = q_in * dq_hat
            inner += pulled
            own = tl.sum(tl.where(i[:, None] == i[None, :], da, 0.0), 1)[:, None]
            dq_hat += own * k_in
            within += own * q_in
            for level in range(6):
                joins, pairs = level_masks(i, level)
                factor = tl.exp2(sum_rows(joins, g, IEEE))
                q_part = (q_in * factor).to(low)
                k_part = (k_in * factor).to(low)
                joined = tl.where(pairs, da, 0.0).to(low)
                to_q = matmul(joined, k_part, tl.zeros([C, BD], tl.float32), IEEE)
                to_k = matmul(tl.trans(joined), q_part, tl.zeros([C, BD], tl.float32), IEEE)
                dq_hat += to_q * factor
                within += to_k * factor
                inner += q_part.to(tl.float32) * to_q - k_part.to(tl.float32) * to_k
            pulled = q_in * dq_hat
        else:
            q_at = ((tl.cast(c, tl.int64) * (H * G) + hq) * C + r[:, None]) * D + d[None, :]
            q_in = tl.load(qt + q_at, mask=inside, other=0.0)
            fall = tl.load(falls + key_tile, mask=inside, other=1.0)
            k_in = tl.load(kt + key_tile, mask=inside, other=0.0)
            da_low = da.to(low)
            through = matmul(da_low, k_in, through * grown[None, :], IEEE) * shrunk[None, :]
            within = matmul(tl.trans(da_low), q_in, within, IEEE)
            pulled = q_in.to(tl.float32) * through
            inner += sum_heads(pulled, Q, C)
            dq_hat = through * per_head(fall, Q, C).to(tl.float32)
        dread += tl.sum(pulled, 1)
        store_rows(dq, dq_hat * (read * scale)[:, None], dq_row, head, d, H * G, D)
    if Q < G:
        for begin in tl.range(0, V, BV, num_stages=STAGES):
            v = begin + tl.arange(0, BV)
            s = tl.load(states + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
            ds = tl.load(dstates + state_tile + v[:, None], mask=inside & (v < V)[:, None], other=0.0)
            later = matmul(load_source(v_base, v_row, h, v, H, V), ds, later, IEEE)
            crossing += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
    if not STRONG:
        fall = tl.load(falls + key_tile, mask=inside, other=1.0)
        k_in = tl.load(kt + key_tile, mask=inside, other=0.0)
        within = within * shrunk[None, :]
        inner -= k_in.to(tl.float32) * within
    passes = tl.load(decay + here * D + d, mask=d < D, other=0.0)
    crossing = tl.where(passes == 0, 0.0, crossing * passes)
    if mapping.PACKED:
        later = of_segment(later, slots.segment, c * C + i, tl.load(slots.tail + c))
    else:
        later = tl.where(tl.load(slots.tail + c) >= 0, later, 0.0)
    if STRONG:
        later = later * tl.exp2(sum_rows(i[:, None] < i[None, :], g, IEEE))
        dk_hat = within + later
        dwrite = tl.sum(k_in * dk_hat, 1)
        crossed = k_in * later
    else:
        within += later
        dwrite = tl.sum(k_in.to(tl.float32) * within, 1)
        crossed = k_in.to(tl.float32) * later
        dk_hat = within * grown[None, :] * inverse(fall.to(tl.float32))
    crossing += tl.sum(crossed, 0)
    db = sum_rows(i[:, None] <= i[None, :], inner - crossed, IEEE) + crossing[None, :]
    if normalizer is not None:
        logits = load_source(g_base, tl.load(slots.token + at_i), h, d, H, D)
        db = db * (inverse(1.0 + tl.exp2(logits.to(tl.float32) * LOG2_E)) * (1.0 / normalizer))
    scatter_slots(dg, tl.where(written[:, None], db, 0.0), slots.token, slots.out, c, h, d, H, D, C)

    at = c * C + i
    real = tl.load(slots.token + at) >= 0
    slot = tl.where(real, tl.load(slots.out + at), 0)
    if dgate is not None:
        both = tl.zeros([C], tl.float32)
        if mapping.READ_GATE:
            both += tl.sum(tl.reshape(tl.where(read != 0, dread / read, 0.0), [Q, C]), 0)
        if mapping.WRITE_GATE:
            both += tl.where(write != 0, dwrite / write, 0.0)
        tl.store(dgate + (part * num_slots.to(tl.int64) + slot) * H + h, both, mask=real)
    dphi = dk_hat * write[:, None]
    if (K_MAP != "identity") or (sources.k_scale is not None):
        keys = load_source(k_base, source_rows(slots.token, slots.segment, at_i, c, S, num_shared, P), h, d, H, D)
        dot = tl.zeros([C], tl.float32)
        if K_MAP == "softmax":
            for piece in tl.static_range(DOTS):
                dot += tl.load(value_dots + (piece * num_slots.to(tl.int64) + slot) * H + h, mask=real, other=0.0)
        phi = tl.where(inside, map_keys(keys, norm, key_scale, K_MAP), 0.0)
        dphi = unmap_keys(dphi, phi, dot, keys, key_scale, K_MAP)
        if sources.k_scale is not None:
            scaled = tl.sum(tl.where(real[:, None] & inside, dphi * keys.to(tl.float32), 0.0), 1, keep_dims=True)
            tl.store(dk_scale + here * PARTS + part + tl.arange(0, 1), tl.sum(scaled, 0))
        dphi = dphi * key_scale
    scatter_slots(dk, dphi, slots.token, slots.out, c, h, d, H, D, C)
