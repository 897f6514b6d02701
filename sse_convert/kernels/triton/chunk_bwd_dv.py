"""Gradients of the values and of the states, over the chunks of a group in reverse. In a chunk that dS leaves,

    dv_j = kd_j dS + sum over i >= j of A_ij do_i        then        dS <- decay dS + qd^T do

with qd, kd, A and the decay from `chunk_fwd_intra`, summed over the query heads of the state.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import gather_slots, in_head, load_source, matmul, scatter_slots


@triton.jit(do_not_specialize=["S", "num_shared", "num_slots", "first_group", "group_chunks"])
def value_gradient_kernel(
    qd, kd, products, values, values_shared, do, decay, slots, entering, dfinal, dinitial, dstates, dv, value_dots,
    S, num_shared, num_slots, first_group, group_chunks,
    shape: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv [slots, H, V]; dstates [chunks, H, D, V], the gradient of the state leaving each chunk; and, if wanted, the
    sum of v * dv, value_dots [V blocks, slots, H].

    Grid (groups, H, blocks of V). Bytes of a slot and head, in bfloat16: 2 D G (qd) + 2 D (kd) + 2 C G (A) + 2 V G (do)
    + 2 V (dv) and 2 D V / C (dS of each chunk). Tiles: as in `chunk_fwd_o`, a state of 128 x 128 takes half of the
    registers of 4 warps; with several query heads to load for each chunk, half of V at a time leaves shared memory for
    two chunks."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    VALUE_P: tl.constexpr = shape.VALUE_P
    IEEE: tl.constexpr = shape.IEEE
    group = first_group + tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    first = tl.load(slots.group_first + group)
    end = tl.load(slots.group_end + group)
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    dstate = tl.load(entering + (group.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
    mine = dstates + (tl.program_id(0).to(tl.int64) * group_chunks * H + h) * D * V
    for step in tl.range(end - first, num_stages=STAGES):
        c = end - 1 - step
        here = tl.cast(c, tl.int64) * H + h
        if dfinal is not None:
            row = tl.load(slots.store + c)
            if row >= 0:
                dstate = tl.load(dfinal + (row.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
        dstate = tl.where(tl.load(slots.tail + c) >= 0, dstate, 0.0)
        low = dstate.to(dstates.dtype.element_ty)
        tl.store(mine + (c - first) * (H * D * V) + tile, low, mask=inside)
        tok = tl.load(slots.token + c * C + i)
        bk = tl.load(kd + (here * C + i[:, None]) * D + d[None, :], mask=in_head(d, D)[None, :], other=0.0)
        factor = tl.load(decay + here * D + d, mask=in_head(d, D), other=0.0)
        acc = matmul(bk, low, tl.zeros([C, BV], tl.float32), IEEE)
        dstate = dstate * factor[:, None]
        for n in tl.static_range(G):
            slot = (here * G + n) * C + i[None, :]
            bo = load_source(do, tok, h * G + n, v, H * G, V)
            a = tl.load(products + slot * C + i[:, None])
            bq = tl.load(qd + slot * D + d[:, None], mask=in_head(d, D)[:, None], other=0.0)
            acc = matmul(a, bo, acc, IEEE)
            dstate = matmul(bq, bo, dstate, IEEE)
        scatter_slots(dv, acc, slots.token, slots.out, c, h, v, H, V, C)
        if value_dots is not None:
            v_base = values
            if VALUE_P > 0:
                v_base = tl.where(c < num_shared, values_shared, values)
            bv = gather_slots(v_base, slots.token, slots.segment, c, h, v, S, num_shared, VALUE_P, H, V, C)
            dots = tl.sum(bv.to(tl.float32) * acc, 1)
            slot = tl.load(slots.out + c * C + i)
            tl.store(value_dots + (tl.program_id(2) * num_slots.to(tl.int64) + slot) * H + h, dots, mask=tok >= 0)
        if dfinal is not None:
            begun = tl.load(slots.load + c)
            if begun >= 0:
                tl.store(dinitial + (begun.to(tl.int64) * H + h) * D * V + tile, dstate, mask=inside)
