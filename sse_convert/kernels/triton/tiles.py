"""What the forward and backward kernels share: loading a chunk of slots, key maps, decays and exact row sums.

Tiles are [C, D] with C = 64 slots; decays are base-2 logarithms inside the kernels.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FAST_BITS = tl.constexpr(60.0)
"""rows that decayed by fewer bits than this since their chunk's first row are factorised around it"""
LEAST_LOG2 = tl.constexpr(-160.0)
"""a step that decays by more bits than this leaves nothing in float32"""
SOFTPLUS = tl.constexpr((
    0.007549172732979059, -0.04256702587008476, 0.11285613477230072, -0.19711892306804657, 0.27564138174057007,
    -0.35840848088264465, 0.48069295287132263, -0.7213401794433594, 1.4426950216293335,
))  # fmt: skip
"""log2(1 + x) / x for 0 < x <= 1 as a polynomial, highest power first: good to 2^-22, in a third of the instructions
of a logarithm, and where x is small better than the logarithm of a rounded sum"""


@triton.jit
def in_head(d, D: tl.constexpr):
    """Whether channels d of an aligned block are of a head of D: where blocks divide D, known when compiled."""
    return tl.full([d.shape[0]], 1, tl.int1) if D // d.shape[0] * d.shape[0] == D else d < D


@triton.jit
def matmul(a, b, acc, IEEE: tl.constexpr):
    """acc + a @ b: bf16 operands with float32 sums, or float32 throughout."""
    if IEEE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    return acc


@triton.jit
def sum_rows(select, x, IEEE: tl.constexpr):
    """select @ x for a 0/1 matrix and float32 x: bf16 tensor cores on x split in two halves, good to 2^-17."""
    zero = tl.zeros([select.shape[0], x.shape[1]], tl.float32)
    if IEEE:
        total = tl.dot(select.to(tl.float32), x, zero, input_precision="ieee")
    else:
        ones = select.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(ones, high, tl.dot(ones, low, zero))
    return total


@triton.jit
def inverse(x):
    """1 / x of positive float32, good to 2^-22: two instructions, where a division takes nine."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def log2_decay(raw, normalizer):
    """Base-2 log decay from natural log decays, or, with a normalizer, from gate logits x as logsigmoid(x) / it."""
    x = raw.to(tl.float32)
    if normalizer is not None:
        e = tl.exp2(-tl.abs(x) * LOG2_E)
        soft = e * SOFTPLUS[0]
        for power in tl.static_range(1, 9):
            soft = (soft + SOFTPLUS[power]) * e
        out = (tl.minimum(x, 0.0) * LOG2_E - soft) / normalizer
    else:
        out = x * LOG2_E
    return tl.where(out < LEAST_LOG2, LEAST_LOG2, out)


@triton.jit
def key_norm(k, d, k_scale, D: tl.constexpr, K_MAP: tl.constexpr):
    """What softmax subtracts from every entry of whole keys [C, BLOCK]: their log-sum-exp, base 2; else zeros."""
    if K_MAP == "softmax":
        x = tl.where(in_head(d, D)[None, :], k.to(tl.float32) * (k_scale * LOG2_E), float("-inf"))
        top = tl.max(x, 1)
        norm = top + tl.log2(tl.sum(tl.exp2(x - top[:, None]), 1))
    else:
        norm = tl.zeros([k.shape[0]], tl.float32)
    return norm


@triton.jit
def map_keys(k, norm, k_scale, K_MAP: tl.constexpr):
    """phi of some channels of keys, in float32, after the head's scale."""
    x = k.to(tl.float32) * k_scale
    if K_MAP == "softmax":
        x = tl.exp2(x * LOG2_E - norm[:, None])
    elif K_MAP == "silu":
        x = x * tl.sigmoid(x)
    elif K_MAP == "relu":
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def unmap_keys(dphi, phi, dot, k, k_scale, K_MAP: tl.constexpr):
    """Gradient with respect to the scaled keys from that with respect to phi; `dot` is the row sum of phi * dphi."""
    if K_MAP == "softmax":
        dphi = phi * (dphi - dot[:, None])
    elif K_MAP == "silu":
        x = k.to(tl.float32) * k_scale
        s = tl.sigmoid(x)
        dphi = dphi * s * (1.0 + x * (1.0 - s))
    elif K_MAP == "relu":
        dphi = tl.where(k.to(tl.float32) * k_scale > 0, dphi, 0.0)
    return dphi


@triton.jit
def slot_weight(gate, tok, rank, ok, K: tl.constexpr, GATED: tl.constexpr):
    """What multiplies q (or k) of each slot: its gate or 1, and 0 for padding. Slots of the shared partition have rank
    K and weight 1."""
    w = tl.where(ok, 1.0, 0.0)
    if GATED:
        sparse = ok & (rank < K)
        w = tl.where(sparse, tl.load(gate + tok.to(tl.int64) * K + rank, mask=sparse, other=1.0), w)
    return w


@triton.jit
def of_segment(x, segment, at, kept):
    """x [rows, BLOCK] without the rows of segments other than `kept`; `at` tells the slot of each row."""
    return tl.where((tl.load(segment + at) == kept)[:, None], x, 0.0)


@triton.jit
def within_segments(x, segment, rows, columns):
    """Products [rows, columns] without those of two segments, of slots `rows` and `columns`. Padding needs no mask: its
    q, k, v and do are zeros."""
    return tl.where(tl.load(segment + rows)[:, None] == tl.load(segment + columns)[None, :], x, 0.0)


@triton.jit
def level_masks(i, level):
    """Halving level of a chunk: which decays join each row to the border between the halves of its block of
    2^(level+1) rows (all of them <= 0, so no factor exceeds 1), and the pairs of a later and an earlier half."""
    half = i >> level
    later = (half & 1) == 1
    start = half << level
    end = start + (1 << level)
    r = i[None, :]
    after = (r >= start[:, None]) & (r <= i[:, None])
    before = (r > i[:, None]) & (r < end[:, None])
    joins = tl.where(later[:, None], after, before)
    block = i >> (level + 1)
    pairs = (block[:, None] == block[None, :]) & later[:, None] & (((i >> level) & 1) == 0)[None, :]
    return joins, pairs


@triton.jit
def slot_ranks(token, out, at, T):
    """Of slots `at`: their tokens, their ranks among the tokens' slots, and whether they are real."""
    tok = tl.load(token + at)
    ok = tok >= 0
    return tl.where(ok, tok, 0), tl.where(ok, tl.load(out + at), 0) // T, ok


@triton.jit
def source_rows(rows, segment, at, c, S, num_shared, P: tl.constexpr):
    """Of slots `at` of chunk c: their rows in x [T, P, ...] (in [T, ...], for the shared partition), -1 for padding."""
    row = tl.load(rows + at)
    if P > 1:
        partition = tl.minimum(tl.load(segment + at, mask=row >= 0, other=0) // S, P - 1)
        row = tl.where((row < 0) | (c < num_shared), row, row * P + partition)
    return row


@triton.jit
def load_source(base, row, head, d, HEADS: tl.constexpr, D: tl.constexpr):
    """Rows [rows, BLOCK] of one head (or of one each) in x [..., HEADS, D]; zeros for padding."""
    ok = row >= 0
    at = (tl.where(ok, row, 0).to(tl.int64) * HEADS + head) * D
    return tl.load(base + at[:, None] + d[None, :], mask=ok[:, None] & in_head(d, D)[None, :], other=0.0)


@triton.jit
def gather_slots(
    base, token, segment, c, head, d, S, num_shared, P: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The [C, BLOCK] rows of a chunk's slots in x [T, P, HEADS, D] (in [T, HEADS, D], for the shared partition)."""
    at = c * C + tl.arange(0, C)
    tok = tl.load(token + at)
    ok = tok >= 0
    row = tl.where(ok, tok, 0)
    if P > 1:
        partition = tl.minimum(tl.where(ok, tl.load(segment + at), 0) // S, P - 1)
        row = tl.where(c < num_shared, row, row * P + partition)
    place = base + head * D + row[:, None].to(tl.int64) * (HEADS * D) + d[None, :]
    return tl.load(place, mask=ok[:, None] & in_head(d, D)[None, :], other=0.0)


@triton.jit
def store_rows(x, value, row, head, d, HEADS: tl.constexpr, D: tl.constexpr):
    """Write rows [rows, BLOCK] of one head (or of one each) to x [..., HEADS, D], but where row is negative."""
    at = (tl.where(row >= 0, row, 0).to(tl.int64) * HEADS + head) * D
    inside = (row >= 0)[:, None] & in_head(d, D)[None, :]
    tl.store(x + at[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def scatter_slots(x, value, token, out, c, head, d, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Write the rows of a chunk's slots to x [slots, HEADS, D]."""
    at = c * C + tl.arange(0, C)
    ok = tl.load(token + at) >= 0
    place = (tl.load(out + at).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    tl.store(x + place, value.to(x.dtype.element_ty), mask=ok[:, None] & in_head(d, D)[None, :])


@triton.jit
def per_head(x, Q: tl.constexpr, C: tl.constexpr):
    """x [C, BLOCK] for each of Q query heads, [Q * C, BLOCK]."""
    if Q > 1:
        x = tl.reshape(tl.broadcast_to(x[None, :, :], [Q, C, x.shape[1]]), [Q * C, x.shape[1]])
    return x


@triton.jit
def sum_heads(x, Q: tl.constexpr, C: tl.constexpr):
    """The sum over Q query heads of x [Q * C, BLOCK], [C, BLOCK]."""
    if Q > 1:
        x = tl.sum(tl.reshape(x, [Q, C, x.shape[1]]), 0)
    return x
