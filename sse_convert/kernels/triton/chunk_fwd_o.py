"""Second half of the forward pass: each group carries its state over its chunks and writes the outputs of its slots."""

import triton
import triton.language as tl

from sse_convert.kernels.triton.tiles import gather_rows, matmul, scatter_rows


@triton.jit(do_not_specialize=["S", "num_shared"])
def output_kernel(
    qd, kd, products, values, values_shared, decay, token, out, segment, head, load, store, group_first, group_end,
    entering, initial, final, o,
    S, num_shared,
    P: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, HAS_STATE: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (groups, query heads, V blocks); o is [ranks * T, Hq, V], one row per slot. Query heads of one state repeat
    its update."""
    group = tl.program_id(0)
    hq = tl.program_id(1)
    h = hq // G
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    inside = (d < D)[:, None] & (v < V)[None, :]
    tile = d[:, None] * V + v[None, :]
    state = tl.load(entering + (group.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
    for c in tl.range(tl.load(group_first + group), tl.load(group_end + group), num_stages=STAGES):
        if HAS_STATE:
            row = tl.load(load + c)
            if row >= 0:
                state = tl.load(initial + (row.to(tl.int64) * H + h) * D * V + tile, mask=inside, other=0.0)
        here = tl.cast(c, tl.int64) * H + h
        slot = ((tl.cast(c, tl.int64) * (H * G) + hq) * C + i)[:, None]
        v_base = values
        if P > 0:
            v_base = tl.where(c < num_shared, values_shared, values)
        bv = gather_rows(v_base, token, segment, c, h, v, S, num_shared, P, H, V, C)
        a = tl.load(products + slot * C + i[None, :])
        bq = tl.load(qd + slot * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        bk = tl.load(kd + (here * C + i[None, :]) * D + d[:, None], mask=(d < D)[:, None], other=0.0)
        factor = tl.load(decay + here * D + d, mask=d < D, other=0.0)
        state = tl.where(tl.load(head + c) >= 0, state, 0.0)
        acc = matmul(bq, state, tl.zeros([C, BV], tl.float32), IEEE)
        acc = matmul(a, bv, acc, IEEE)
        scatter_rows(o, acc, token, out, c, hq, v, H * G, V, C)
        state = matmul(bk, bv, state * factor[:, None], IEEE)
        if HAS_STATE:
            done = tl.load(store + c)
            if (done >= 0) & (hq % G == 0):
                tl.store(final + (done.to(tl.int64) * H + h) * D * V + tile, state, mask=inside)
