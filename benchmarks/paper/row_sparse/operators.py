"""The mixers' recurrences over whole rows of tokens, as masked matmuls. Work and memory grow with T squared."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sse_convert.kernels.torch.chunk_intra import Gradients, decay_tree, within_chunks, within_chunks_backward


def gated_linear_attention(q_RBTHD: Tensor, k_RBTHD: Tensor, v_RBTHV: Tensor, log_decay_RBTHD: Tensor) -> Tensor:
    """`gated_linear_attention_steps` for every row and head; a spared state row has key and log decay 0.

    The whole row is one chunk of the SSE operator's engine, which here neither packs, nor routes, nor waits for the
    device: a training step can be captured in a CUDA graph. Long rows belong to `sse_attention`.

    Args:
        q_RBTHD: queries, already scaled.
        k_RBTHD: keys, after `apply_updates`.
        v_RBTHV: values.
        log_decay_RBTHD: natural log, <= 0, after `apply_updates`.

    Returns:
        [R, B, T, H, V].
    """
    inputs = [_by_head(x) for x in (q_RBTHD, k_RBTHD, v_RBTHV, log_decay_RBTHD)]
    o_ETV: Tensor = _OneChunk.apply(*(x.flatten(0, 2) for x in inputs))  # type: ignore[no-untyped-call]
    o_RBHTV = torch.unflatten(o_ETV, 0, inputs[0].shape[:3])
    return o_RBHTV[..., : q_RBTHD.shape[2], :].movedim(2, 3)


def gated_slot_attention(
    q_RBTHK: Tensor, k_RBTHK: Tensor, v_RBTHV: Tensor, write_RBTHD: Tensor, log_decay_RBTHD: Tensor
) -> Tensor:
    """`gated_slot_attention_steps` for every row and head; a spared slot has write strength and log decay 0.

    Returns:
        [R, B, T, H, V].
    """
    inputs = (_by_head(x) for x in (q_RBTHK, k_RBTHK, write_RBTHD, log_decay_RBTHD))
    scores_RBTHD = _slot_scores(*inputs)[..., : q_RBTHK.shape[2], :].movedim(2, 3)
    return gated_linear_attention(torch.softmax(scores_RBTHD, -1), write_RBTHD, v_RBTHV, log_decay_RBTHD)


class _OneChunk(torch.autograd.Function):
    """o_t = q_t S_t for rows of one chunk, [E, T, dim] each, T a power of two; the backward makes the scores again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, log_decay)
        return torch.bmm(within_chunks(q.clone(), k.clone(), decay_tree(log_decay.exp())), v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        q, k, v, log_decay = ctx.saved_tensors
        gradients = Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k))
        d_scores = torch.bmm(d_out, v.mT)
        scores, _, _ = within_chunks_backward(q, k, decay_tree(log_decay.exp()), d_scores, gradients)
        return gradients.q, gradients.k, torch.bmm(scores.mT, d_out), gradients.log_decay


def _slot_scores(q: Tensor, k: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
    """K_t q_t: what each slot of the key state K^i_t = a^i_t K^i_{t-1} + write^i_t k_t answers the query of its token.

    The decay lies on the side of what is read, where the SSE operator has none. As there, blocks of 1, 2, 4 ... tokens
    meet in pairs: the right one reads the left one's writes, decayed to the end of the left and from the start of the
    right one. Every factor lies in [0, 1], so nothing overflows.

    Args:
        q: [..., T, K], T a power of two.
        k: [..., T, K].
        write: [..., T, D].
        log_decay: [..., T, D], natural log, <= 0.

    Returns:
        [..., T, D].
    """
    scores, to_end, from_start = (q * k).sum(-1, keepdim=True) * write, write, log_decay.exp()
    half = 1
    while half < q.shape[-2]:
        (_, q_right), (k_left, _), (write_left, write_right) = (_halves(x, half) for x in (q, k, to_end))
        (scores_left, scores_right), (decay_left, decay_right) = (_halves(x, half) for x in (scores, from_start))
        read = decay_right * ((q_right @ k_left.mT) @ write_left)
        scores = _merged(scores_left, scores_right + read)
        to_end = _merged(write_left * decay_right[..., -1:, :], write_right)
        from_start = _merged(decay_left, decay_right * decay_left[..., -1:, :])
        half *= 2
    return scores


def _by_head(x_RBTHD: Tensor) -> Tensor:
    """[R, B, H, T', D], T' the next power of two: tokens of zeros follow the last."""
    x_RBHTD, T = x_RBTHD.movedim(3, 2), x_RBTHD.shape[2]
    return F.pad(x_RBHTD, (0, 0, 0, (1 << (T - 1).bit_length()) - T)).contiguous()


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Left and right block [..., pairs, half, D] of each pair of [..., T, D]."""
    left, right = torch.unflatten(x, -2, (-1, 2, half)).unbind(-3)
    return left, right


def _merged(left: Tensor, right: Tensor) -> Tensor:
    """[..., T, D] of the two blocks of each pair."""
    return torch.stack((left, right), -3).flatten(-4, -2)
