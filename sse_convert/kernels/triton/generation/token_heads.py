"""What attention makes of the projections of one new token per row, head by head, in one launch: norm and rotation of
queries and keys, the side path and the gate logits of SSE, and the places of keys and values in a cache.

    q = turn(norm(f_q)),    q_shared = turn(norm(f_q + side_q up_q^T)),    k alike,    decay = f_decay up^T + bias

of projections f, with norm(x) = x / sqrt(mean(x^2) + eps) * (gain + offset) and turn(a, b) = (a cos - b sin, b cos +
a sin) on the halves of a head; all in float32.

Shape letters: B rows, Hq query heads, H state heads, C key heads of the projection, D key dim, V value dim.
"""

import dataclasses as dc

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES = ("k", "v", "side_q", "side_k", "decay", "shared_decay")
"""what the kernel looks up by its first column; queries begin at 0"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """What stands between the projections and attention."""

    norms: tuple[Tensor, Tensor] | None = None
    """gains [D] of the norms of q and k"""
    eps: float = 0.0
    """added to the means of squares"""
    offset: float = 0.0
    """added to the gains"""
    side: tuple[Tensor, Tensor] | None = None
    """of q [Hq * D, rank] and k [H * D, rank]"""
    decay: tuple[Tensor, Tensor] | None = None
    """[H * D or H, rank] and its bias"""
    shared_decay: tuple[Tensor, Tensor] | None = None
    """the same, of a shared partition with its own"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Where the results go. All but k and v are contiguous; of these, what a head holds of a token is."""

    q: Tensor
    """[B, Hq, D]"""
    k: Tensor
    """[B, H, D], or [B, H, slots, D] of a cache"""
    v: Tensor
    """[B, H, V], or [B, H, slots, V]"""
    shared: tuple[Tensor, Tensor] | None = None
    """q and k after the side path"""
    decay: Tensor | None = None
    """float32 [B, H, D]"""
    shared_decay: Tensor | None = None
    slot: Tensor | None = None
    """int64, 0-d: the slot of the caches that the new token takes"""


def token_heads(
    projected: Tensor, columns: dict[str, int], weights: HeadWeights, rotation: tuple[Tensor, Tensor] | None, out: Heads
) -> None:
    """Fill `out`.

    Args:
        projected: float32 [B, columns], contiguous in the columns.
        columns: where q, k and v begin in it, and what `weights` multiply: side_q, side_k, decay, shared_decay.
        weights: of the layer; all of one dtype, contiguous.
        rotation: cos and sin [1 or B, D], contiguous; None for no rotation.
        out: what to fill.
    """
    (B, Hq, D), H, V = out.q.shape, out.k.shape[1], out.v.shape[-1]
    key_heads = (columns["v"] - columns["k"]) // D
    cos, sin = rotation or (None, None)
    (q_gain, k_gain), (q_up, k_up) = weights.norms or (None, None), weights.side or (None, None)
    (up, bias), (own_up, own_bias) = weights.decay or (None, None), weights.shared_decay or (None, None)
    q_shared, k_shared = out.shared or (None, None)
    some = weights.decay or weights.shared_decay
    with torch.cuda.device_of(projected):
        token_heads_kernel[(B, Hq + H)](
            projected, q_gain, k_gain, cos, sin, q_up, k_up, up, bias, own_up, own_bias,
            out.q, q_shared, out.k, k_shared, out.v, out.decay, out.shared_decay, out.slot,
            weights.eps, projected.stride(0), 0 if cos is None or len(cos) == 1 else D,
            out.k.stride(0), out.k.stride(1), out.v.stride(0), out.v.stride(1),
            COLUMNS=tuple(columns.get(name, 0) for name in PLACES), OFFSET=weights.offset, HQ=Hq, H=H,
            GROUPS=H // key_heads, D=D, V=V, BH=triton.next_power_of_2(D // 2),
            BV=triton.next_power_of_2(V), RANK=1 if q_up is None else q_up.shape[1],
            BR=1 if q_up is None else triton.next_power_of_2(q_up.shape[1]),
            DECAY_RANK=1 if some is None else some[0].shape[1],
            BD=1 if some is None else triton.next_power_of_2(some[0].shape[1]),
            BY_CHANNEL=some is not None and len(some[0]) == H * D, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["eps"])
def token_heads_kernel(
    projected, q_gain, k_gain, cos, sin, q_up, k_up, up, bias, own_up, own_bias,
    q, q_shared, k, k_shared, v, decay, shared_decay, slot,
    eps, width, turn_stride, k_row, k_head, v_row, v_head,
    COLUMNS: tl.constexpr, OFFSET: tl.constexpr, HQ: tl.constexpr, H: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
    DECAY_RANK: tl.constexpr, BD: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One query head, or one state head with its key, value and gate logits; COLUMNS are those of `PLACES`.

    Grid (B, Hq + H). Bytes of a head, in bfloat16: 2 D rank of its side path, 2 D rank of its decays, from memory once
    for all rows, and 4 D of each projection. Tiles: half a head and the whole rank, so that both halves, which
    rotation mixes, are at hand in the same threads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BH)
    f = projected + row * width
    if cos is not None:
        cos += row * turn_stride
        sin += row * turn_stride
    if head < HQ:
        at = (row * HQ + head) * D
        side = f + COLUMNS[2]
        _one_head(f + head * D, side, q_up, head, q_gain, cos, sin, q + at, q_shared, at, eps, d, D, OFFSET, RANK, BR)
    else:
        h = head - HQ
        c = h // GROUPS
        place = tl.load(slot) if slot is not None else 0
        own = k + row * k_row + h.to(tl.int64) * k_head + place * D
        at = (row * H + h) * D
        key, side = f + COLUMNS[0] + c * D, f + COLUMNS[3]
        _one_head(key, side, k_up, h, k_gain, cos, sin, own, k_shared, at, eps, d, D, OFFSET, RANK, BR)
        dv = tl.arange(0, BV)
        b_v = tl.load(f + COLUMNS[1] + c * V + dv, mask=dv < V, other=0.0)
        tl.store(v + row * v_row + h.to(tl.int64) * v_head + place * V + dv, b_v.to(v.dtype.element_ty), mask=dv < V)
        if decay is not None:
            _gate_logits(f + COLUMNS[4], up, bias, decay + at, h, d, D, DECAY_RANK, BD, BY_CHANNEL)
        if shared_decay is not None:
            _gate_logits(f + COLUMNS[5], own_up, own_bias, shared_decay + at, h, d, D, DECAY_RANK, BD, BY_CHANNEL)


@triton.jit
def _one_head(
    f, latent, up, head, gain, cos, sin, o, o_shared, at, eps, d,
    D: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A head of q or k, and the same after its side path."""
    HALF: tl.constexpr = D // 2
    inside = d < HALF
    a = tl.load(f + d, mask=inside, other=0.0)
    b = tl.load(f + HALF + d, mask=inside, other=0.0)
    _place(a, b, gain, cos, sin, o, eps, d, D, OFFSET)
    if up is not None:
        a += _rows_of(latent, up, head * D + d, inside, RANK, BR)
        b += _rows_of(latent, up, head * D + HALF + d, inside, RANK, BR)
        _place(a, b, gain, cos, sin, o_shared + at, eps, d, D, OFFSET)


@triton.jit
def _place(a, b, gain, cos, sin, o, eps, d, D: tl.constexpr, OFFSET: tl.constexpr):
    """Norm, rotate and store the halves of a head."""
    HALF: tl.constexpr = D // 2
    inside = d < HALF
    if gain is not None:
        r = tl.rsqrt(tl.sum(a * a + b * b, 0) / D + eps)
        a *= r * (tl.load(gain + d, mask=inside, other=0.0).to(tl.float32) + OFFSET)
        b *= r * (tl.load(gain + HALF + d, mask=inside, other=0.0).to(tl.float32) + OFFSET)
    first, second = a, b
    if cos is not None:
        first = a * tl.load(cos + d, mask=inside, other=0.0).to(tl.float32)
        first -= b * tl.load(sin + d, mask=inside, other=0.0).to(tl.float32)
        second = b * tl.load(cos + HALF + d, mask=inside, other=0.0).to(tl.float32)
        second += a * tl.load(sin + HALF + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(o + d, first.to(o.dtype.element_ty), mask=inside)
    tl.store(o + HALF + d, second.to(o.dtype.element_ty), mask=inside)


@triton.jit
def _rows_of(latent, up, rows, inside, RANK: tl.constexpr, BR: tl.constexpr):
    """Some rows of latent up^T."""
    r = tl.arange(0, BR)
    b_x = tl.load(latent + r, mask=r < RANK, other=0.0)
    b_w = tl.load(up + rows[:, None] * RANK + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0)
    return tl.sum(b_w.to(tl.float32) * b_x[None, :], 1)


@triton.jit
def _gate_logits(
    latent, up, bias, o, h, d, D: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Those of the decays of a state head, one for each channel, or one for all."""
    HALF: tl.constexpr = D // 2
    inside = d < HALF
    for first in tl.static_range(0, D, HALF):
        rows = h * D + first + d if BY_CHANNEL else h + 0 * d
        b_o = _rows_of(latent, up, rows, inside, RANK, BR)
        b_o += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        tl.store(o + first + d, b_o, mask=inside)
