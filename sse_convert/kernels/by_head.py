"""Partitions that every head chooses for itself, a token's writes apart from its reads, on the backends for one choice.

To a backend every head of a sequence is a sequence of its own, of two tokens for each token: one that writes and reads
nothing, then one that reads and writes nothing.

Shape letters: T tokens, S sequences, Hq query heads, H state heads, G query heads of a state head, D key dim, V value
dim, M partitions in the state.
"""

import dataclasses as dc
from collections.abc import Callable

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs, SharedInputs

NO_DECAY = 100.0
"""gate logit of a decay of 1"""


def run_by_head(
    x: Inputs, run: Callable[[Inputs], tuple[Tensor, Tensor | None]], *, inplace_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, Hq, V] and final states [S, M, H, D, V], or None if `run` gives none.

    Args:
        x: the inputs, whose states are not in slots.
        run: computes inputs of one choice per token.
        inplace_state: write the final states into `x.initial_state` and return it.
    """
    H = x.k.shape[2]
    o, folded = run(_folded(x))
    read = o.view(H, x.num_tokens, 2, *o.shape[1:])[:, :, 1].transpose(0, 1).flatten(1, 2)
    final = None if folded is None else _unfolded_states(folded, H)
    if inplace_state and final is not None and x.initial_state is not None:
        final = x.initial_state.copy_(final)
    return read, final


def _folded(x: Inputs) -> Inputs:
    """The same call with a sequence for each head of each sequence, head by head."""
    assert x.read_logits is not None
    rest = 0.0 if x.decay_normalizer is None else NO_DECAY
    shared = x.shared and SharedInputs(
        q=_reads(x.shared.q, x.k.shape[2]),
        k=_writes(scaled_keys(x.shared.k, x.k_scale)),
        v=_writes(x.shared.v),
        log_decay=_writes(x.shared.log_decay, rest),
        write_strength=None if x.shared.write_strength is None else _writes(x.shared.write_strength),
        own_values=x.shared.own_values,
    )
    return dc.replace(
        x,
        q=_reads(x.q[:, 0], x.k.shape[2])[:, None],
        k=_writes(scaled_keys(x.k[:, 0], x.k_scale))[:, None],
        v=_writes(x.v[:, 0])[:, None],
        log_decay=_writes(x.log_decay, rest),
        write_strength=None if x.write_strength is None else _writes(x.write_strength),
        router_logits=_pairs(x.router_logits, x.read_logits),
        read_logits=None,
        shared=shared,
        k_scale=None,
        cu_seqlens=_offsets(x.cu_seqlens, x.num_tokens, x.k.shape[2]),
        max_seqlen=None if x.max_seqlen is None else 2 * x.max_seqlen,
        initial_state=None if x.initial_state is None else _folded_states(x.initial_state),
    )


def _pairs(written: Tensor, read: Tensor) -> Tensor:
    """[H * T * 2, ...] of what tokens write and what they read, each [T, H, ...]."""
    return torch.stack([written, read], 2).transpose(0, 1).flatten(0, 2)


def _writes(x: Tensor, rest: float = 0.0) -> Tensor:
    """[H * T * 2, 1, ...] of [T, H, ...] with `rest` where tokens read. One value for all channels stays one."""
    alike = x.dim() > 2 and x.stride(-1) == 0
    own = x[..., :1] if alike else x
    found = _pairs(own, torch.full_like(own, rest))[:, None]
    return found.expand(*found.shape[:-1], x.shape[-1]) if alike else found


def _reads(q: Tensor, heads: int) -> Tensor:
    """[H * T * 2, G, D] of queries [T, Hq, D] with zeros where tokens write."""
    grouped = q.reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    return _pairs(torch.zeros_like(grouped), grouped)


def scaled_keys(k: Tensor, k_scale: Tensor | None) -> Tensor:
    """Keys [T, H, D] times their scale [H], in their dtype: heads that are sequences have one scale."""
    return k if k_scale is None else (k * k_scale[:, None]).to(k.dtype)


def _offsets(cu_seqlens: Tensor, tokens: int, heads: int) -> Tensor:
    first = torch.arange(heads, device=cu_seqlens.device, dtype=cu_seqlens.dtype)[:, None] * (2 * tokens)
    starts = first + 2 * cu_seqlens[:-1]
    return torch.cat([starts.flatten(), cu_seqlens.new_full((1,), 2 * tokens * heads)])


def _folded_states(states: Tensor) -> Tensor:
    """[S, M, H, D, V] as [H * S, M, 1, D, V]."""
    return states.permute(2, 0, 1, 3, 4).flatten(0, 1).unsqueeze(2).contiguous()


def _unfolded_states(states: Tensor, heads: int) -> Tensor:
    """[H * S, M, 1, D, V] as [S, M, H, D, V]."""
    by_head = states.squeeze(2).view(heads, states.shape[0] // heads, states.shape[1], *states.shape[3:])
    return by_head.permute(1, 2, 0, 3, 4).contiguous()
