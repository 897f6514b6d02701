"""Second half of the forward pass: each group carries its state over its chunks and writes the outputs of its slots."""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import gather_slots, matmul, scatter_slots


@triton.jit(do_not_specialize=["S", "num_shared"])
def output_kernel(
    qd, kd, products, values, values_shared, decay, value_rows, slots, entering, initial, final, o, S, num_shared,
    shape: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (groups, query heads, V blocks); o is [ranks * T, Hq, V], one row per slot. Query heads of one state repeat
    its update."""
    H: tl.constexpr = shape.H
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    VALUE_P: tl.constexpr = shape.VALUE_P
    IEEE: tl.constexpr = shape.IEEE
    group = tl.program_id(0)
    hq = tl.program_id(1)
    h = hq // G
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    inside = (d < D)[:, None] & (v < V)[None, :]
    tile = d[:, None] * V + v[None, :]
    state = tl.load(entering + (group.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
    for c in tl.range(tl.load(slots.group_first + group), tl.load(slots.group_end + group), num_stages=STAGES):
        if initial is not None:
            row = tl.load(slots.load + c)
            if row >= 0:
                state = tl.load(initial + (row.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
        here = tl.cast(c, tl.int64) * H + h
        slot = ((tl.cast(c, tl.int64) * (H * G) + hq) * C + i)[:, None]
        v_base = values
        if VALUE_P > 0:
            v_base = tl.where(c < num_shared, values_shared, values)
        bv = gather_slots(v_base, value_rows, slots.segment, c, h, v, S, num_shared, VALUE_P, H, V, C)
        a = tl.load(products + slot * C + i[None, :])
        bq = tl.load(qd + slot * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        bk = tl.load(kd + (here * C + i[None, :]) * D + d[:, None], mask=(d < D)[:, None], other=0.0)
        factor = tl.load(decay + here * D + d, mask=d < D, other=0.0)
        state = tl.where(tl.load(slots.head + c) >= 0, state, 0.0)
        acc = matmul(bq, state, tl.zeros([C, BV], tl.float32), IEEE)
        acc = matmul(a, bv, acc, IEEE)
        scatter_slots(o, acc, value_rows, slots.out, c, hq, v, H * G, V, C)
        state = matmul(bk, bv, state * factor[:, None], IEEE)
        if initial is not None:
            done = tl.load(slots.store + c)
            if (done >= 0) & (hq % G == 0):
                tl.store(final + (done.to(tl.int64) * H + h) * D * V + tile, state, mask=inside)
