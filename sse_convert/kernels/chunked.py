"""Chunk-parallel gated linear attention on packed segments, in plain torch: the engine of three backends.

Inside a chunk the decay between two tokens is built by doubling blocks, from one token to the whole chunk. Each block
carries three things: its queries decayed from the block's start, its keys decayed to the block's end, and its total
decay. Two neighbouring blocks then meet in one matmul (queries of the right one, keys of the left one) and merge with
one multiplication each. Every factor is a product of decays, so it lies in (0, 1]: nothing overflows however strong the
decay, no logarithms are subtracted, and a token's result depends on nothing after it, to the last bit.
"""

import dataclasses as dc

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 64
"""tokens per chunk, a power of two (benchmarks/kernels/torch_backends.py measures it)"""


def gated_linear_attention(
    q_THGD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    log_decay_THD: Tensor,
    cu_seqlens: Tensor,
    state_SHDV: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t outer v_t;  o_t = q_t S_t, over packed segments.

    Args:
        q_THGD: queries, already scaled.
        k_THD: keys.
        v_THV: values.
        log_decay_THD: natural log, <= 0.
        cu_seqlens: [S + 1] int64 offsets of the segments, any device (one device sync if not on the CPU).
        state_SHDV: states before each segment.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        o [T, H, G, V] and the states after each segment [S, H, D, V]; an empty segment returns its state unchanged.
    """
    layout = chunk_layout(cu_seqlens, chunk_size, q_THGD.device)
    q_LHCGD = layout.to_chunks(q_THGD)
    v_LHCV = layout.to_chunks(v_THV)
    chunk = _within_chunks(q_LHCGD, layout.to_chunks(k_THD), v_LHCV, layout.to_chunks(log_decay_THD).exp())
    update_LHDV = chunk.k_to_end_LHCD.transpose(-1, -2) @ v_LHCV
    before_LHDV, after_SHDV = _scan_states(update_LHDV, chunk.decay_LHD, state_SHDV, layout)
    q_LHXD = chunk.q_from_start_LHCGD.flatten(2, 3)
    o_LHXV = chunk.out_LHXV + q_LHXD @ before_LHDV
    return layout.to_tokens(o_LHXV.unflatten(2, q_LHCGD.shape[2:4])), after_SHDV


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Segments cut into L chunks of C tokens, each segment starting at a chunk of its own.

    Chunks are ordered by their place in the segment, then by segment from the longest to the shortest. So step c of the
    state scan is the slice of `alive[c]` chunks at `step_starts[c]`, and its segments are the first ones of step c - 1.
    """

    segment_order: Tensor
    """int64 [S], segments from the most chunks to the fewest"""
    alive: list[int]
    """per step, the number of segments that still have a chunk"""
    token_LC: Tensor
    """int64 [L, C], token of each place; T where there is none"""
    place_T: Tensor
    """int64 [T], place (chunk * C + row) of each token"""

    def to_chunks(self, x_TH: Tensor) -> Tensor:
        """Rows [T, H, ...] to [L, H, C, ...], zero where there is no token."""
        padded = torch.cat([x_TH, x_TH.new_zeros(1, *x_TH.shape[1:])])
        rows = padded.index_select(0, self.token_LC.flatten()).unflatten(0, self.token_LC.shape)
        return rows.transpose(1, 2).contiguous()

    def to_tokens(self, x_LHC: Tensor) -> Tensor:
        """[L, H, C, ...] back to [T, H, ...]."""
        return x_LHC.transpose(1, 2).flatten(0, 1).index_select(0, self.place_T)


def chunk_layout(cu_seqlens: Tensor, chunk_size: int, device: torch.device) -> ChunkLayout:
    """Cut segments into chunks; the index arithmetic runs on the CPU, the result lies on `device`."""
    starts_S, ends_S = cu_seqlens.cpu()[:-1], cu_seqlens.cpu()[1:]
    chunks_S = (ends_S - starts_S + chunk_size - 1) // chunk_size
    order_S = torch.sort(chunks_S, descending=True, stable=True).indices
    steps = int(chunks_S.max()) if len(chunks_S) else 0
    alive_c = len(chunks_S) - torch.searchsorted(chunks_S[order_S].flip(0), torch.arange(steps), right=True)
    step_L = torch.repeat_interleave(torch.arange(steps), alive_c)
    rank_L = torch.arange(len(step_L)) - torch.repeat_interleave(alive_c.cumsum(0) - alive_c, alive_c)
    first_L = starts_S[order_S][rank_L] + step_L * chunk_size
    first_L, end_L = first_L.to(device), ends_S[order_S][rank_L].to(device)
    token_LC = first_L[:, None] + torch.arange(chunk_size, device=device)
    total = int(ends_S[-1]) if len(ends_S) else 0
    real_LC = token_LC < end_L[:, None]
    token_LC = torch.where(real_LC, token_LC, total)
    place_T = torch.zeros(total + 1, dtype=torch.int64, device=device)
    place_T[token_LC.flatten()] = torch.arange(token_LC.numel(), device=device)
    return ChunkLayout(
        segment_order=order_S.to(device), alive=alive_c.tolist(), token_LC=token_LC, place_T=place_T[:total]
    )


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    out_LHXV: Tensor
    """what tokens read from tokens of their own chunk; X = C * G rows"""
    q_from_start_LHCGD: Tensor
    """queries times the decay since before the chunk"""
    k_to_end_LHCD: Tensor
    """keys times the decay until the chunk's end"""
    decay_LHD: Tensor
    """decay over the whole chunk"""


def _within_chunks(q_LHCGD: Tensor, k_LHCD: Tensor, v_LHCV: Tensor, decay_LHCD: Tensor) -> _Chunk:
    """Attention inside each chunk by doubling blocks; see the head of the file."""
    L, H, C, G, D = q_LHCGD.shape
    scores = (q_LHCGD * k_LHCD[..., None, :]).sum(-1).view(L, H, C, G, 1)  # a token reads its own write undecayed
    q, k, decay = (q_LHCGD * decay_LHCD[..., None, :]).view(L, H, C, G, D), k_LHCD[..., None, :], decay_LHCD
    half = 1
    while half < C:
        blocks = C // (2 * half)
        q, k = q.view(L, H, blocks, 2, half * G, D), k.view(L, H, blocks, 2, half, D)
        decay = decay.view(L, H, blocks, 2, 1, D)
        scores = scores.view(L, H, blocks, 2, half * G, half)
        across = q[:, :, :, 1] @ k[:, :, :, 0].transpose(-1, -2)
        upper = F.pad(scores[:, :, :, 0], (0, half))
        scores = torch.cat([upper, torch.cat([across, scores[:, :, :, 1]], dim=-1)], dim=3)
        q = torch.cat([q[:, :, :, 0], q[:, :, :, 1] * decay[:, :, :, 0]], dim=3)
        k = torch.cat([k[:, :, :, 0] * decay[:, :, :, 1], k[:, :, :, 1]], dim=3)
        decay = decay[:, :, :, 0] * decay[:, :, :, 1]
        half *= 2
    scores_LHXC = scores.view(L, H, C * G, C)
    return _Chunk(
        out_LHXV=scores_LHXC @ v_LHCV,
        q_from_start_LHCGD=q.view(L, H, C, G, D),
        k_to_end_LHCD=k.view(L, H, C, D),
        decay_LHD=decay.view(L, H, D),
    )


def _scan_states(
    update_LHDV: Tensor, decay_LHD: Tensor, state_SHDV: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """State before each chunk [L, H, D, V] and after each segment [S, H, D, V]."""
    state = state_SHDV.index_select(0, layout.segment_order)
    updates = update_LHDV.split(layout.alive)
    decays = decay_LHD[..., None].split(layout.alive)
    before, finished = [], []
    for update, decay in zip(updates, decays, strict=True):
        alive = len(update)
        finished.append(state[alive:])
        before.append(state[:alive])
        state = torch.addcmul(update, decay, state[:alive])
    final = torch.cat([state, *reversed(finished)])
    after_SHDV = final.index_select(0, torch.argsort(layout.segment_order))
    return (torch.cat(before) if before else update_LHDV), after_SHDV
