"""The recurrent state across chunks: a local pass over groups of chunks, a scan over groups, and a pass that stores
the state of every chunk.

One recurrence serves both directions. Forward: S <- decay S + kd^T v. Backward, over chunks in reverse, with dS the
gradient of the state that leaves a chunk: dS <- decay dS + sum over query heads of qd^T do. Below, x is kd or qd and y
is v or do.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import gather_slots, in_head, matmul


@triton.jit(do_not_specialize=["S", "num_shared", "first_group", "group_chunks"])
def state_kernel(
    x, y, y_shared, decay, token, inject, slots, initial, local, carry, chunk_states,
    S, num_shared, first_group, group_chunks,
    shape: tl.constexpr, REVERSE: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S <- decay S + x^T y over the chunks of a group. Without `chunk_states` it starts from zero and writes its own
    state to `local` and its decay to `carry`; with them it starts from `local`, then the state entering it, and writes
    each chunk's.

    Grid (groups, H, blocks of V). Bytes of a slot and head, in bfloat16: 2 D G (x) + 2 V G (y), and 2 D V / C for
    states of chunks; 4 D V of a group. Tiles: 128 x 128 of a state take 64 registers of 8 warps, so that two programs
    share a multiprocessor and one computes while the other waits for its loads, asked for two steps ahead."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    VALUE_P: tl.constexpr = shape.VALUE_P
    IEEE: tl.constexpr = shape.IEEE
    STORE: tl.constexpr = chunk_states is not None
    group = first_group + tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    first = tl.load(slots.group_first + group)
    count = tl.load(slots.group_end + group) - first
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    place = (group.to(tl.int64) * H + h) * D
    state = tl.load(local + place * V + tile, mask=inside, other=0.0) if STORE else tl.zeros([BD, BV], tl.float32)
    passed = tl.full([BD], 1.0, tl.float32)
    mine = (tl.program_id(0).to(tl.int64) * group_chunks * H + h) * D * V
    for step in tl.range(count * G, num_stages=STAGES):
        n = step % G
        opening = n == 0
        c = first + step // G
        if REVERSE:
            c = first + count - 1 - step // G
        if initial is not None:
            row = tl.load(inject + c)
            begins = opening & (row >= 0)
            begun = tl.zeros([BD, BV], tl.float32)
            if begins:
                begun = tl.load(initial + (row.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
                passed = tl.zeros([BD], tl.float32)
            state = tl.where(begins, begun, state)  # a state that a branch replaces, triton 3.7 breaks for sm_100
        here = tl.cast(c, tl.int64) * H + h
        if STORE:
            at = chunk_states + mine + (c - first) * (H * D * V) + tile
            tl.store(at, state.to(chunk_states.dtype.element_ty), mask=inside)
        factor = tl.load(decay + here * D + d, mask=in_head(d, D), other=0.0)
        if G > 1:
            factor = tl.where(opening, factor, 1.0)
        bx = tl.load(x + ((here * G + n) * C + i[None, :]) * D + d[:, None], mask=in_head(d, D)[:, None], other=0.0)
        y_base = y
        if VALUE_P > 0:
            y_base = tl.where(c < num_shared, y_shared, y)
        by = gather_slots(y_base, token, slots.segment, c, h * G + n, v, S, num_shared, VALUE_P, H * G, V, C)
        state = matmul(bx, by, tl.where(factor[:, None] == 0, 0.0, state * factor[:, None]), IEEE)
        passed = passed * factor
    if not STORE:
        tl.store(local + place * V + tile, state, mask=inside)
        tl.store(carry + place + d, passed, mask=in_head(d, D))


@triton.jit(do_not_specialize=["groups"])
def scan_kernel(
    local, carry, groups,
    shape: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S <- decay S + own, group by group: replaces each group's own state in `local` by the state entering it.

    Grid (H, blocks of ROWS of D). Bytes of a group and head: 8 D V (state, read and written) + 4 D (decay). Tiles:
    groups follow each other, so programs come from rows of states alone: 8 rows each, which are asked for three steps
    ahead."""
    H: tl.constexpr = shape.H
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    h = tl.program_id(0)
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    v = tl.arange(0, BV)
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    state = tl.zeros([ROWS, BV], tl.float32)
    for step in tl.range(groups, num_stages=STAGES):
        group = groups - 1 - step if REVERSE else step
        at = (tl.cast(group, tl.int64) * H + h) * D
        factor = tl.load(carry + at + d, mask=in_head(d, D), other=0.0)
        own = tl.load(local + at * V + tile, mask=inside, other=0.0)
        tl.store(local + at * V + tile, state, mask=inside)
        state = tl.where(factor[:, None] == 0, 0.0, state * factor[:, None]) + own
