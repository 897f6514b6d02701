"""Where each token goes when packed segments are cut into chunks, and in which order the chunks are worked on."""

import dataclasses as dc

import torch
from torch import Tensor


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Some consecutive steps of the state scan, worked on together so that their tensors stay small."""

    rows: Tensor
    """int64 [E * C], row (token * H + head) of each place; T * H where there is no token"""
    alive: list[int]
    """per step, the number of segments that have a chunk there"""
    num_heads: int
    """H"""
    chunk_size: int
    """C"""

    @property
    def num_chunk_heads(self) -> int:
        """E, chunks of the slab times heads."""
        return sum(self.alive) * self.num_heads

    def take(self, x_TH: Tensor) -> Tensor:
        """Rows [T, H, ...] as [E, C, ...], zero where there is no token."""
        last = x_TH.shape[0] * x_TH.shape[1] - 1
        rows = x_TH.flatten(0, 1).index_select(0, self.rows.clamp_max(last))
        rows.masked_fill_((self.rows > last).view(-1, *[1] * (rows.dim() - 1)), 0)
        return rows.view(self.num_chunk_heads, self.chunk_size, *x_TH.shape[2:])

    def put(self, out: Tensor, x_EC: Tensor) -> None:
        """Write [E, C, ...] to the rows of out [T * H + 1, ...]; the last one collects what is no token."""
        out.index_copy_(0, self.rows, x_EC.flatten(0, 1))

    def steps(self, *tensors_E: Tensor) -> list[tuple[Tensor, ...]]:
        """For each step, the chunks [segments, H, ...] of every tensor [E, ...]."""
        by_chunk = (x.view(-1, self.num_heads, *x.shape[1:]) for x in tensors_E)
        return list(zip(*(torch.split(x, self.alive) for x in by_chunk), strict=True))


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Segments cut into chunks of C tokens, each segment starting at a chunk of its own.

    Chunks are ordered by their place in the segment (the step of the state scan), then by segment from the longest to
    the shortest. So the segments of a step are the first ones of the step before.
    """

    segment_order: Tensor
    """int64 [S], segments from the most chunks to the fewest"""
    slabs: list[Slab]
    """all chunks, in order"""


def chunk_layout(
    cu_seqlens: Tensor, num_heads: int, chunk_size: int, rows_per_slab: int, device: torch.device
) -> ChunkLayout:
    """Cut segments into chunks.

    Args:
        cu_seqlens: [S + 1] offsets, any device; chunks are counted on the CPU, which costs one sync from elsewhere.
        num_heads: H.
        chunk_size: C.
        rows_per_slab: a slab ends before it has more rows than this (chunks * heads * C), but has one step at least.
        device: where the index tensors go.
    """
    cu_seqlens = cu_seqlens.cpu()
    chunks_S = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    order_S = torch.sort(chunks_S, descending=True, stable=True).indices
    steps = int(chunks_S.max()) if len(chunks_S) else 0
    alive = len(chunks_S) - torch.searchsorted(chunks_S[order_S].flip(0), torch.arange(steps), right=True)
    step_L = torch.repeat_interleave(alive)
    segment_L = order_S[torch.arange(len(step_L)) - (alive.cumsum(0) - alive)[step_L]]
    first_L, end_L = (cu_seqlens[segment_L] + step_L * chunk_size).to(device), cu_seqlens[segment_L + 1].to(device)

    token_L1C = first_L[:, None, None] + torch.arange(chunk_size, device=device)
    rows_LHC = token_L1C * num_heads + torch.arange(num_heads, device=device)[:, None]
    rows_LHC = torch.where(token_L1C < end_L[:, None, None], rows_LHC, int(cu_seqlens[-1]) * num_heads)
    groups = _group_steps(alive.tolist(), rows_per_slab // (num_heads * chunk_size))
    slabs = [
        Slab(rows=rows.flatten(), alive=group, num_heads=num_heads, chunk_size=chunk_size)
        for rows, group in zip(torch.split(rows_LHC, [sum(group) for group in groups]), groups, strict=True)
    ]
    return ChunkLayout(segment_order=order_S.to(device), slabs=slabs)


def _group_steps(alive: list[int], max_chunks: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for count in alive:
        if groups and sum(groups[-1]) + count <= max_chunks:
            groups[-1].append(count)
        else:
            groups.append([count])
    return groups
