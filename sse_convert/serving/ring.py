"""Softmax attention in a window with sinks over a state of constant size: the keys and values that it can still see.

A request's row holds [2, sinks + window, H, D]: keys and values of the first `sinks` positions, then those of the last
`window` positions p >= sinks in a ring, at column sinks + (p - sinks) % window. A copy of the row at any time is a
valid past, which is all that prefix caching asks of a state.

Shape letters: R requests, T tokens, Hq query heads, H key heads, G = Hq / H, D head dim, C = sinks + window columns.
"""

import dataclasses as dc

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.triton_backend import has_kernels
from sse_convert.serving.batch import Batch

BLOCKS_AT_ONCE = 64
"""blocks of queries whose keys are gathered at a time"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class RingWindow:
    """A window with sinks, and how the family computes its softmax."""

    window: int
    """positions that a query sees, its own included"""
    sinks: int
    """first positions, which stay visible"""
    scale: float
    """multiplies the products"""
    soft_cap: float | None = None
    """c of c * tanh(products / c); None for none"""

    def shape(self, heads: int, dim: int) -> tuple[int, int, int, int]:
        """[2, C, H, D] of one request's row."""
        return 2, self.sinks + self.window, heads, dim

    def held(self, last: Tensor) -> Tensor:
        """The position [R, C] in each column once position `last` [R] is in; negative where there is none."""
        column = torch.arange(self.sinks + self.window, device=last.device)
        newest = last[:, None].long()
        in_ring = newest - (newest - column) % self.window
        in_ring = in_ring.where(in_ring >= self.sinks, -1)
        return torch.where(column < self.sinks, column.where(column <= newest, -1), in_ring)


def window_steps(w: RingWindow, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    """One token of each request; puts it into its row.

    Args:
        w: the window.
        q: [R, Hq, D], rotated as the family does.
        k: [R, H, D], likewise.
        v: [R, H, D].
        rows: [rows, 2, C, H, D]; row 0 takes what padding writes.
        batch: of R requests with one token each.

    Returns:
        [R, Hq, D].
    """
    if has_kernels(q):
        from sse_convert.kernels.triton.generation.ring_attention import ring_attention

        o: Tensor = ring_attention(
            q, k, v, rows, batch.slots, batch.past,
            window=w.window, sinks=w.sinks, scale=w.scale, soft_cap=w.soft_cap,
        )  # fmt: skip
        return o
    slots, past = batch.slots.clamp_min(0).long(), batch.past.long()
    column = torch.where(past < w.sinks, past, w.sinks + (past - w.sinks) % w.window)
    rows[slots, :, column] = torch.stack([k, v], 1).to(rows.dtype)
    keys, values = rows[slots].unbind(1)
    seen = w.held(past) >= 0
    return _softmax(w, q[:, None], keys, values, seen[:, None])[:, 0]


def window_rows(w: RingWindow, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    """Any number of new tokens of each request; leaves each row as the last one of them finds it.

    Rows of requests without a past must be zeros. Blocks of `window` queries attend to the sinks, the window before the
    block and the block, so work and memory are linear in T; how many blocks there may be is known on the host. For
    arguments see `window_steps`; q, k and v have T tokens here.
    """
    R, W = batch.requests, w.window
    slots, past, lengths = batch.slots.clamp_min(0).long(), batch.past.long(), batch.lengths().long()
    kept = rows[slots]
    ends = torch.cumsum((lengths + W - 1) // W, 0)
    o = q.new_empty(batch.tokens + 1, *q.shape[1:])  # the last one is for queries that blocks have too many
    for first in range(0, batch.tokens // W + R, BLOCKS_AT_ONCE):
        block = torch.arange(first, min(first + BLOCKS_AT_ONCE, batch.tokens // W + R), device=q.device)
        row = torch.searchsorted(ends, block, right=True).clamp_max(R - 1)
        ahead = (block - (ends - (lengths + W - 1) // W)[row]) * W
        ahead = ahead.where(block < ends[-1], lengths[row])  # of blocks that are not needed: no token is left
        _attend_blocks(w, (q, k, v), kept, o, (row, ahead, past[row], lengths[row], batch.offsets[row].long()))
    _store(w, k, v, rows, kept, batch)
    return o[:-1]


def _attend_blocks(
    w: RingWindow, heads: tuple[Tensor, Tensor, Tensor], kept: Tensor, o: Tensor, of_block: tuple[Tensor, ...]
) -> None:
    """Fills in o for some blocks, of which `of_block` [blocks] has the request, tokens before it, and the request's
    past, length and first token."""
    (q, k, v), W, S = heads, w.window, w.sinks
    row, ahead, past, length, start = (x[:, None] for x in of_block)
    inside = torch.arange(W, device=q.device)
    asking = ahead + inside
    token = (start + asking).where(asking < length, len(q))
    near = past + ahead + torch.arange(-W, W, device=q.device)
    sink = torch.arange(S, device=q.device).expand(len(row), S)
    position = torch.cat([sink, near], 1)
    is_sink = torch.arange(S + 2 * W, device=q.device) < S
    at = (past + asking)[:, :, None]
    key = position[:, None]
    sees = (key <= at) & (is_sink | ((key >= S) & (key > at - W)))
    new = position >= past
    column = torch.where(position < S, position, S + (position - S) % W).clamp_min(0)
    fresh = (start + position - past).clamp(0, len(q) - 1)
    keys, values = (
        torch.where(new[..., None, None], x[fresh], kept[row, side, column].to(x.dtype))
        for side, x in enumerate((k, v))
    )
    o[token] = _softmax(w, q[token.clamp_max(len(q) - 1)], keys, values, sees)


def _store(w: RingWindow, k: Tensor, v: Tensor, rows: Tensor, kept: Tensor, batch: Batch) -> None:
    """Writes each request's row anew: its last tokens where they belong, and of what was kept the rest."""
    slots, past = batch.slots.clamp_min(0).long(), batch.past.long()
    position = w.held(past + batch.lengths() - 1)
    new = (position >= past[:, None])[..., None, None]
    token = (batch.offsets[:-1, None].long() + position - past[:, None]).clamp(0, len(k) - 1)
    rows[slots] = torch.stack(
        [torch.where(new, x[token].to(rows.dtype), kept[:, side]) for side, x in enumerate((k, v))], 1
    )


def _softmax(w: RingWindow, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """q [B, L, Hq, D], k and v [B, K, H, D], sees bool [B, L, K] -> [B, L, Hq, D]."""
    (B, L, Hq, D), H = q.shape, k.shape[2]
    G = Hq // H
    q = q.view(B, L, H, G, D).permute(0, 2, 3, 1, 4).reshape(B, H, G * L, D)
    k, v = (x.to(q.dtype).transpose(1, 2) for x in (k, v))
    mask = sees[:, None, None].expand(B, 1, G, *sees.shape[1:]).reshape(B, 1, G * L, -1)
    if w.soft_cap is None:
        o = F.scaled_dot_product_attention(q, k, v, mask, scale=w.scale)
    else:
        products = w.soft_cap * torch.tanh(q.float() @ k.float().mT * (w.scale / w.soft_cap))
        o = (products.masked_fill(~mask, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)
    return o.view(B, H, G, L, D).permute(0, 3, 1, 2, 4).reshape(B, L, Hq, D)
