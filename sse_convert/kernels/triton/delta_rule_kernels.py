"""Kernels of the gated delta rule: from values v to the corrected values u that gated linear attention then writes.

Each token writes u_t = beta_t (v_t - k_t S), S being the state after the token's decay. Inside a chunk the u solve

    (I + diag(beta) A) U = diag(beta) (V - K S_0)    A_ij = k_i k_j under the decay between them, for j < i

(the WY or UT transform, arXiv:2406.06484, section 3), K being the keys decayed from the chunk's start and S_0 the state
that enters. A does not depend on states, so all inverses are computed at once; then one program walks through the
chunks of a segment, forward for U and, with dS the gradient of the state that leaves a chunk, backward for

    G = (I + diag(beta) A)^-T (dU + K_end dS)    dV = diag(beta) G    d beta = rows of G * U / beta

after which keys are read like queries whose outputs have the gradient -dV, as `chunk_bwd_dqkg.py` does it.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import in_head, level_masks, load_source, matmul, source_rows, store_rows


@triton.jit
def inverse_kernel(products, beta, slots, inverse, shape: tl.constexpr):
    """(I + diag(beta) A)^-1 by halves: that of two neighbouring blocks is their inverses and, below, what these make of
    the products between the blocks.

    Grid (chunks, H). Bytes of a slot and head, in bfloat16: 4 C (A, float32) + 4 (beta) + 2 C (inverse). Tiles: all of
    a chunk, as float32 32 registers of 4 warps: each level multiplies what the one before left there."""
    H: tl.constexpr = shape.H
    C: tl.constexpr = shape.C
    IEEE: tl.constexpr = shape.IEEE
    c = tl.program_id(0)
    h = tl.program_id(1)
    i = tl.arange(0, C)
    if tl.load(slots.token + c * C) < 0:
        return
    square = (c.to(tl.int64) * H + h) * C * C + i[:, None] * C + i[None, :]
    a = tl.load(products + square) * slot_strength(beta, slots.out, c, h, H, C)[:, None]
    _, pairs = level_masks(i, 0)
    x = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pairs, -a, 0.0))
    for level in range(1, 6):
        _, pairs = level_masks(i, level)
        x -= product(x, product(tl.where(pairs, a, 0.0), x, IEEE), IEEE)
    tl.store(inverse + square, x.to(inverse.dtype.element_ty))


@triton.jit
def product(a, b, IEEE: tl.constexpr):
    """a @ b for float32 operands: as such, or in tf32, whose 10 bits are more than the inverse is stored in."""
    return tl.dot(a, b, input_precision="ieee" if IEEE else "tf32")


@triton.jit
def slot_strength(beta, out, c, h, H: tl.constexpr, C: tl.constexpr):
    """beta of a chunk's slots, 0 for padding."""
    return strength_of(beta, tl.load(out + c * C + tl.arange(0, C)), h, H)


@triton.jit
def strength_of(beta, place, h, H: tl.constexpr):
    """beta [slots, H] of some slots, 0 for padding."""
    return tl.load(beta + place.to(tl.int64) * H + h, mask=place >= 0, other=0.0)


@triton.jit(do_not_specialize=["S", "num_shared", "groups"])
def correct_kernel(
    k_start, k_end, inverse, beta, values, values_shared, decay, slots, initial, entering, u, S, num_shared, groups,
    shape: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """U = inverse diag(beta) (V - K S), then S <- decay S + K_end^T U. The program of a segment's first group walks
    through all its groups; it writes u of each slot and the state that enters each group.

    Grid (groups, H, blocks of V). Bytes of a slot, head and block, in bfloat16: 4 D (K, K_end) + 2 C (inverse), and
    once 2 V (v) + 2 V (u) + 4 (beta); 4 D V of a group. Tiles: chunks follow each other, so programs come from heads
    and blocks of V alone: 32 columns each. What the blocks read alike comes from the L2 cache but once. A chunk's slots
    are known a step ahead, so that its loads wait for no table."""
    H: tl.constexpr = shape.H
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    VALUE_P: tl.constexpr = shape.VALUE_P
    IEEE: tl.constexpr = shape.IEEE
    group = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    state = tl.zeros([BD, BV], tl.float32)
    mine = begins(group, slots)
    while mine:
        tl.store(entering + (group.to(tl.int64) * H + h) * D * V + tile, state, mask=inside)
        first = tl.load(slots.group_first + group)
        end = tl.load(slots.group_end + group)
        next_row = source_rows(slots.token, slots.segment, first * C + i, first, S, num_shared, VALUE_P)
        next_place = tl.load(slots.out + first * C + i)
        next_strength = strength_of(beta, next_place, h, H)
        for c in tl.range(first, end, num_stages=STAGES):
            row, place, strength = next_row, next_place, next_strength
            following = tl.minimum(c + 1, end - 1)
            next_row = source_rows(slots.token, slots.segment, following * C + i, following, S, num_shared, VALUE_P)
            next_place = tl.load(slots.out + following * C + i)
            next_strength = strength_of(beta, next_place, h, H)
            if initial is not None:
                source = tl.load(slots.load + c)
                begun = tl.zeros([BD, BV], tl.float32)
                if source >= 0:
                    begun = tl.load(initial + (source.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
                state = tl.where(source >= 0, begun, state)  # as in `chunk_state`
            here = tl.cast(c, tl.int64) * H + h
            v_base = values
            if VALUE_P > 0:
                v_base = tl.where(c < num_shared, values_shared, values)
            bv = load_source(v_base, row, h, v, H, V)
            bk = tl.load(k_start + (here * C + i[:, None]) * D + d[None, :], mask=in_head(d, D)[None, :], other=0.0)
            kept = tl.load(k_end + (here * C + i[None, :]) * D + d[:, None], mask=in_head(d, D)[:, None], other=0.0)
            solve = tl.load(inverse + (here * C + i[:, None]) * C + i[None, :])
            factor = tl.load(decay + here * D + d, mask=in_head(d, D), other=0.0)
            held = matmul(bk, state, tl.zeros([C, BV], tl.float32), IEEE)
            right = (bv.to(tl.float32) - held) * strength[:, None]
            bu = matmul(solve, right, tl.zeros([C, BV], tl.float32), IEEE).to(u.dtype.element_ty)
            store_rows(u, bu, place, h, v, H, V)
            state = matmul(kept, bu, state * factor[:, None], IEEE)
        group += 1
        mine = continues(group, groups, slots)


@triton.jit
def begins(group, slots):
    """Whether a group is used and its first chunk is the first of a segment."""
    first = tl.load(slots.group_first + group)
    used = first < tl.load(slots.group_end + group)
    return used & ((tl.load(slots.head + first) < 0) | (tl.load(slots.load + first) >= 0))


@triton.jit
def continues(group, groups, slots):
    """Whether there is such a group and it continues the segment of the one before."""
    there = group < groups
    group = tl.where(there, group, 0)
    used = tl.load(slots.group_first + group) < tl.load(slots.group_end + group)
    return there & used & (begins(group, slots) == 0)


@triton.jit(do_not_specialize=["num_slots", "groups"])
def correct_backward_kernel(
    k_start, k_end, inverse, beta, u, du, decay, slots, leaving, d_read, d_beta, d_initial, num_slots, groups,
    shape: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """G = inverse^T (dU + K_end dS), then dS <- decay dS - K^T diag(beta) G. The program of a segment's last group
    walks back through all its groups. Per slot it writes -dv to d_read [slots, H, V] and the part of its V block to
    d_beta [blocks, slots, H]; besides, the gradient of the state that leaves each group and of initial states.

    Grid (groups, H, blocks of V). Bytes of a slot, head and block, in bfloat16: 4 D (K, K_end) + 2 C (inverse) + 4 (d
    beta), and once 4 V (u, du) + 2 V (dv) + 4 (beta); 4 D V of a group. Tiles: as `correct_kernel`."""
    H: tl.constexpr = shape.H
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    IEEE: tl.constexpr = shape.IEEE
    group = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    dstate = tl.zeros([BD, BV], tl.float32)
    used = tl.load(slots.group_first + group) < tl.load(slots.group_end + group)
    mine = used & (continues(group + 1, groups, slots) == 0)
    while mine:
        tl.store(leaving + (group.to(tl.int64) * H + h) * D * V + tile, dstate, mask=inside)
        first = tl.load(slots.group_first + group)
        end = tl.load(slots.group_end + group)
        next_place = tl.load(slots.out + (end - 1) * C + i)
        next_strength = strength_of(beta, next_place, h, H)
        for step in tl.range(end - first, num_stages=STAGES):
            c = end - 1 - step
            here = tl.cast(c, tl.int64) * H + h
            place, strength = next_place, next_strength
            following = tl.maximum(c - 1, first)
            next_place = tl.load(slots.out + following * C + i)
            next_strength = strength_of(beta, next_place, h, H)
            given = load_source(du, place, h, v, H, V).to(tl.float32)
            bu = load_source(u, place, h, v, H, V).to(tl.float32)
            bk = tl.load(k_end + (here * C + i[:, None]) * D + d[None, :], mask=in_head(d, D)[None, :], other=0.0)
            start = tl.load(k_start + (here * C + i[None, :]) * D + d[:, None], mask=in_head(d, D)[:, None], other=0.0)
            solve = tl.load(inverse + (here * C + i[None, :]) * C + i[:, None])
            factor = tl.load(decay + here * D + d, mask=in_head(d, D), other=0.0)
            right = matmul(bk, dstate, given, IEEE)
            g = matmul(solve, right, tl.zeros([C, BV], tl.float32), IEEE)
            read = (g * -strength[:, None]).to(d_read.dtype.element_ty)
            store_rows(d_read, read, place, h, v, H, V)
            of_block = (tl.program_id(2) * num_slots.to(tl.int64) + place) * H + h
            tl.store(d_beta + of_block, tl.sum(g * bu, 1) / tl.where(place >= 0, strength, 1.0), mask=place >= 0)
            dstate = matmul(start, read, dstate * factor[:, None], IEEE)
            if d_initial is not None:
                begun = tl.load(slots.load + c)
                if begun >= 0:
                    tl.store(d_initial + (begun.to(tl.int64) * H + h) * D * V + tile, dstate, mask=inside)
        mine = begins(group, slots) == 0
        group -= 1
