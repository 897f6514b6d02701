"""Outputs of the slots: each group carries its state over its chunks. In a chunk that the state S enters,

    o_i = qd_i S + sum over j <= i of A_ij v_j        then        S <- decay S + kd^T v

with qd, kd, A and the decay from `chunk_fwd_intra`.
"""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import in_head, load_source, matmul, source_rows, store_rows


@triton.jit(do_not_specialize=["T", "S", "num_shared"])
def output_kernel(
    qd, kd, products, values, values_shared, decay, value_rows, slots, entering, initial, final, o, total,
    T, S, num_shared,
    shape: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """o_i = qd_i S + A_i v. PART "all" and "sparse" write o [ranks * T, Hq, V], one row per slot, of all chunks or of
    those without the shared partition. "shared" adds the K slots of each token that are there already, and writes total
    [T, Hq, V].

    Grid (groups, query heads / Q, blocks of V). Bytes of a slot and query head, in bfloat16: 2 D (qd) + 2 D / Q (kd) +
    2 C (A) + 2 V / Q (v) + 2 V (o). Tiles: 128 x 128 of a state take 128 registers of 4 warps, so with what two steps
    load (112 KB) one program fills a multiprocessor. Two query heads of one state share its update, as 128 rows of a
    product on 8 warps. Then there are registers to know the rows to gather a chunk ahead, so that their loads wait for
    no table; and the sparse partitions go first, so that the program of a shared chunk adds what its tokens read there,
    and nobody sums over slots. With one head both cost more than they save."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    VALUE_P: tl.constexpr = shape.VALUE_P
    IEEE: tl.constexpr = shape.IEEE
    group = tl.program_id(0)
    first = tl.load(slots.group_first + group)
    end = tl.load(slots.group_end + group)
    if PART == "sparse":
        first = tl.maximum(first, num_shared)
    if PART == "shared":
        end = tl.minimum(end, num_shared)
    if first >= end:
        return
    hq = tl.program_id(1) * Q
    h = hq // G
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    r = tl.arange(0, Q * C)
    inside = in_head(d, D)[:, None] & in_head(v, V)[None, :]
    tile = d[:, None] * V + v[None, :]
    state = tl.load(entering + (group.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
    if Q > 1:
        next_row = source_rows(value_rows, slots.segment, first * C + i, first, S, num_shared, VALUE_P)
        next_place = tl.load(slots.out + first * C + r % C)
    for c in tl.range(first, end, num_stages=STAGES):
        if Q > 1:
            row, place = next_row, next_place
            following = tl.minimum(c + 1, end - 1)
            next_row = source_rows(value_rows, slots.segment, following * C + i, following, S, num_shared, VALUE_P)
            next_place = tl.load(slots.out + following * C + r % C)
        else:
            row = source_rows(value_rows, slots.segment, c * C + i, c, S, num_shared, VALUE_P)
            place = tl.load(slots.out + c * C + r % C)
        if initial is not None:
            begun = tl.load(slots.load + c)
            if begun >= 0:
                state = tl.load(initial + (begun.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
        here = tl.cast(c, tl.int64) * H + h
        slot = ((tl.cast(c, tl.int64) * (H * G) + hq) * C + r)[:, None]
        v_base = values
        if VALUE_P > 0:
            v_base = tl.where(c < num_shared, values_shared, values)
        bv = load_source(v_base, row, h, v, H, V)
        a = tl.load(products + slot * C + i[None, :])
        bq = tl.load(qd + slot * D + d[None, :], mask=in_head(d, D)[None, :], other=0.0)
        writes = kd + (here * C + i[None, :]) * D + d[:, None]
        if not IEEE:
            bk = tl.load(writes, mask=in_head(d, D)[:, None], other=0.0)
        factor = tl.load(decay + here * D + d, mask=in_head(d, D), other=0.0)
        state = tl.where(tl.load(slots.head + c) >= 0, state, 0.0)
        acc = matmul(bq, state, tl.zeros([Q * C, BV], tl.float32), IEEE)
        acc = matmul(a, bv, acc, IEEE)
        head = hq + r // C
        if PART == "shared":
            token = tl.where(place >= 0, place - K * T, -1)
            if c < num_shared:  # always: what is loaded on a condition takes no shared memory
                for rank in tl.static_range(K):
                    sparse = tl.where(token >= 0, token + rank * T, -1)
                    acc += load_source(o, sparse, head, v, H * G, V).to(tl.float32)
            store_rows(total, acc, token, head, v, H * G, V)
        else:
            store_rows(o, acc, place, head, v, H * G, V)
        if IEEE:  # after the other products, whose operands need its shared memory
            bk = tl.load(writes, mask=in_head(d, D)[:, None], other=0.0)
        state = matmul(bk, bv, state * factor[:, None], IEEE)
        if initial is not None:
            done = tl.load(slots.store + c)
            if (done >= 0) & (hq % G == 0):
                tl.store(final + (done.to(tl.int64) * H + h) * D * V + tile, state, mask=inside)
