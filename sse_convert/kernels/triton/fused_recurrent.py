"""The decode step: one token for each of many sequences, in one launch that touches the used partitions' states only.

Each program owns a block of V of one head of one sequence: it routes the token, loads the states of the partitions that
the token uses, and stores them where they were, after, for each of them,

    S <- decay S + gate phi(k)^T v        then        o = sum over partitions of gate scale q S

or by the delta rule S <- decay S + gate beta phi(k)^T (v - phi(k) decay S).

Shape letters: S sequences = tokens, N partitions, K = top_k, H state heads, G query heads per state
head, D key dim, V value dim, P = 1 when partitions share q, k and v, else N.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.feature_maps import NORM_EPS
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch_modes import operator_name
from sse_convert.kernels.triton.tiles import LOG2_E, log2_decay, map_keys

L2_EPS = tl.constexpr(NORM_EPS)


def sse_attention_decode(x: Inputs, *, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """Advance every sequence by its one token, without gradients, host syncs or copies of untouched partitions.

    Args:
        x: the inputs, one token per sequence.
        inplace_state: write into `x.initial_state`, float32 and contiguous, and return it; else into a copy of it.
            With `x.state_slots`, into those rows of it; a row is contiguous, in float32 or bfloat16.

    Returns:
        o [S, Hq, V] in v's dtype and the final states [S, M, H, D, V] in float32.
    """
    state = _writable_state(x, inplace_state)
    strengths = [] if x.write_strength is None else [x.write_strength]
    if x.shared is not None and x.shared.write_strength is not None:
        strengths.append(x.shared.write_strength)
    shared = () if x.shared is None else (x.shared.q, x.shared.k, x.shared.v, x.shared.log_decay)
    sparse = [part.contiguous() for part in (x.q, x.k, x.v, x.log_decay)]
    o = _decode(
        *sparse, [part.to(like.dtype).contiguous() for part, like in zip(shared, sparse, strict=False)],
        [strength.float().contiguous() for strength in strengths], x.router_logits.contiguous(),
        x.k_scale, state, x.state_slots,
        x.top_k, x.write_gate, x.read_gate, x.scale, x.k_map, x.decay_normalizer,
    )  # fmt: skip
    return o, state


def _writable_state(x: Inputs, inplace: bool) -> Tensor:
    if inplace:
        assert x.initial_state is not None
        return x.initial_state
    if x.initial_state is None:
        shape = x.num_sequences, x.num_states, *x.k.shape[2:], x.v.shape[3]
        return x.q.new_zeros(shape, dtype=torch.float32)
    return x.initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


@torch.library.custom_op(operator_name(__name__, "decode"), mutates_args=("state",))
def _decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, shared: list[Tensor], strengths: list[Tensor],
    router_logits: Tensor, k_scale: Tensor | None, state: Tensor, slots: Tensor | None,
    top_k: int, write_gate: bool, read_gate: bool, scale: float, k_map: str,
    decay_normalizer: float | None,
) -> Tensor:  # fmt: skip
    (S, N), (P, Hq, D), (H, V) = router_logits.shape, q.shape[1:], v.shape[2:]
    G = Hq // H
    o = v.new_empty(S, Hq, V)
    if S == 0:
        return o
    q_shared, k_shared, v_shared, decay_shared = shared or (q, k, v, log_decay)
    beta, beta_shared = (strengths[0], strengths[-1]) if strengths else (None, None)
    ranks = top_k + bool(shared)
    block_d, block_v, block_k, warps = _blocks(S * H, D, V, ranks)
    decode_kernel[(S * H * triton.cdiv(V, block_v),)](
        q, k, v, log_decay, q_shared, k_shared, v_shared, decay_shared, beta, beta_shared, k_scale, router_logits,
        state, slots, o,
        state.stride(0), scale, decay_normalizer,
        N=N, Q_P=P, K_P=k.shape[1], V_P=v.shape[1], RANKS=ranks, SHARED=bool(shared),
        WRITE_GATE=write_gate, READ_GATE=read_gate, K_MAP=k_map,
        H=H, G=G, D=D, V=V,
        BN=triton.next_power_of_2(N), BD=block_d, BV=block_v, BK=block_k, num_warps=warps,
    )  # fmt: skip
    return o


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[2], v.shape[3])


def _blocks(states: int, dim: int, value_dim: int, ranks: int) -> tuple[int, int, int, int]:
    """BD, BV, partitions at a time and warps, for the number of sequences times heads.

    A program keeps at most 64 state elements per thread; few states are cut finer, so that all multiprocessors work.
    """
    block_d = max(16, triton.next_power_of_2(dim))
    block_v = min(triton.next_power_of_2(value_dim), 16 if states * value_dim < 8192 else 32)
    at_once = max(1, 8192 // (block_d * block_v))
    return block_d, block_v, min(triton.next_power_of_2(ranks), at_once), 4


@triton.jit(do_not_specialize=["scale", "normalizer"])
def decode_kernel(
    q, k, v, log_decay, q_shared, k_shared, v_shared, decay_shared, beta, beta_shared, k_scale, router_logits,
    state, slots, o,
    state_stride, scale, normalizer,
    N: tl.constexpr, Q_P: tl.constexpr, K_P: tl.constexpr, V_P: tl.constexpr, RANKS: tl.constexpr, SHARED: tl.constexpr,
    WRITE_GATE: tl.constexpr, READ_GATE: tl.constexpr,
    K_MAP: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The partitions of a token are ranked best first, the shared one last; BK at once.

    Grid (S * H * blocks of V). Bytes of a sequence and head: 8 D V (4 D V of pages in bfloat16) for each of its K + 1
    partitions, whatever N is. Tiles: at most 8192 elements of states at once, 64 registers of 4 warps; 32 columns of V,
    or 16 where there are so few states that not all multiprocessors would work."""
    BG: tl.constexpr = triton.next_power_of_2(G)
    blocks = (V + BV - 1) // BV
    b = (tl.program_id(0) // (blocks * H)).to(tl.int64)
    h = tl.program_id(0) // blocks % H
    dv = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    d = tl.arange(0, BD)
    group = tl.arange(0, BG)
    in_d = (d < D)[None, :]
    slot = b
    if slots is not None:
        slot = tl.load(slots + b).to(tl.int64)
    state += slot * state_stride
    key_scale = tl.load(k_scale + h).to(tl.float32) if k_scale is not None else 1.0
    e, score = _gates(router_logits, b, N, BN)
    acc = tl.zeros([BG, BV], tl.float32)
    for first in range(0, RANKS, BK):
        rank = first + tl.arange(0, BK)
        is_shared = (rank == RANKS - 1) & SHARED
        ok = rank < RANKS
        partition, weight, score = _next_ranks(e, score, rank, RANKS - SHARED, BN, BK)
        partition = tl.where(is_shared, N, partition)
        q_row = tl.where(is_shared, b, b * Q_P + partition % Q_P) * (H * G) + h * G
        k_row = tl.where(is_shared, b, b * K_P + partition % K_P) * H + h
        v_row = tl.where(is_shared, b, b * V_P + partition % V_P) * H + h

        given = tl.where(is_shared, decay_shared, log_decay) + (b * H + h) * D
        in_k = ok[:, None] & in_d
        decay = log2_decay(tl.load(given[:, None] + d[None, :], mask=in_k, other=0.0), normalizer)
        decay = tl.where(ok[:, None], tl.exp2(decay), 1.0)
        given = tl.where(is_shared, k_shared, k) + k_row * D
        keys = tl.load(given[:, None] + d[None, :], mask=in_k, other=0.0)
        keys = _mapped(keys, key_scale, in_d, K_MAP)
        strength = tl.where(ok, weight if WRITE_GATE else 1.0, 0.0)
        if beta is None:
            keys = keys * strength[:, None]
        given = tl.where(is_shared, v_shared, v) + v_row * V
        values = tl.load(given[:, None] + dv[None, :], mask=ok[:, None] & (dv < V)[None, :], other=0.0).to(tl.float32)

        row = (partition.to(tl.int64) * H + h)[:, None, None] * (D * V)
        at = row + d[None, :, None] * V + dv[None, None, :]
        inside = in_k[:, :, None] & (dv < V)[None, None, :]
        if slots is not None:
            inside = inside & (tl.zeros([BK, 1, 1], tl.int64) + slot >= 0)
        tile = tl.load(state + at, mask=inside, other=0.0)
        tile = tile * decay[:, :, None]
        if beta is not None:
            given = tl.where(is_shared, beta_shared, beta) + b * H + h
            strength *= tl.load(given, mask=ok, other=0.0).to(tl.float32)
            values = (values - tl.sum(keys[:, :, None] * tile, 1)) * strength[:, None]
        tile += keys[:, :, None] * values[:, None, :]
        tl.store(state + at, tile, mask=inside)
        read_weight = tl.where(ok, weight if READ_GATE else 1.0, 0.0) * scale
        given = tl.where(is_shared, q_shared, q) + q_row * D
        for g in tl.static_range(G):
            query = tl.load(given[:, None] + g * D + d[None, :], mask=in_k, other=0.0).to(tl.float32)
            read = tl.sum(tl.sum((query * read_weight[:, None])[:, :, None] * tile, 0), 0)
            acc += tl.where(group[:, None] == g, read[None, :], 0.0)
    at = (b * (H * G) + h * G + group)[:, None] * V + dv[None, :]
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=(group < G)[:, None] & (dv < V)[None, :])


@triton.jit
def _mapped(k, k_scale, inside, K_MAP: tl.constexpr):
    """phi of whole keys, one to a row, in float32."""
    norm = tl.zeros([k.shape[0]], tl.float32)
    if K_MAP == "softmax":
        x = tl.where(inside, k.to(tl.float32) * k_scale * LOG2_E, float("-inf"))
        norm = tl.max(x, 1)
        norm += tl.log2(tl.sum(tl.exp2(x - norm[:, None]), 1))
    phi = map_keys(k, norm, k_scale, "silu" if K_MAP == "l2" else K_MAP)
    if K_MAP == "l2":
        phi = phi * tl.rsqrt(tl.sum(phi * phi, 1) + L2_EPS)[:, None]
    return phi


@triton.jit
def _gates(router_logits, b, N: tl.constexpr, BN: tl.constexpr):
    """The softmax e of a token's logits, and what its partitions are ranked by."""
    n = tl.arange(0, BN)
    logits = tl.load(router_logits + b * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    e = tl.exp(logits - tl.max(logits, 0))
    e = e / tl.sum(e, 0)
    return e, tl.where(n < N, e, float("-inf"))


@triton.jit
def _next_ranks(e, score, rank, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Partitions [BK] of the next ranks, their gates (1 from rank K on), and the scores of what is left to rank."""
    n = tl.arange(0, BN)
    lane = tl.arange(0, BK)
    partition = tl.zeros([BK], tl.int32)
    weight = tl.full([BK], 1.0, tl.float32)
    for i in tl.static_range(BK):
        best = tl.argmax(score, 0)
        here = (lane == i) & (rank < K)
        partition = tl.where(here, best, partition)
        weight = tl.where(here, tl.sum(tl.where(n == best, e, 0.0), 0), weight)
        score = tl.where(n == best, float("-inf"), score)
    return partition, weight, score
