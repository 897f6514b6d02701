"""Losses of logits and their gradients, one program per token; gradients take the logits' place.

Each program reads its row twice: for the largest logit with the sum of exponentials, then for the loss. torch's
operations move some 80 bytes per bfloat16 logit for the divergence and 40 for the cross entropy.

The logits z of a row are cap * tanh(scale * x / cap) of what is stored, or scale * x without a cap.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton.launching import launch

TILE = 2048
"""logits that a program holds at a time"""
WARPS = 8


def divergence_(
    x: Tensor,
    y: Tensor,
    scales: tuple[float, float],
    caps: tuple[float | None, float | None],
    answers: Tensor | None = None,
    known: float = 0.5,
) -> Tensor:
    """KL(p || q) of each token, float32 [T], for p of y and q of x; x becomes its gradient.

    Args:
        x: [T, V] the student's, before scale and cap; contiguous.
        y: [T, V] the teacher's.
        scales: of student and teacher.
        caps: of student and teacher; None for none.
        answers: int64 [T], a token that is sure to follow, or less than 0 for none. Where p gives it less than `known`,
            it has all of p.
        known: see `answers`.
    """
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        launch(
            divergence_kernel, (len(x),), x, y, losses, answers, *scales, *(cap or 0.0 for cap in caps),
            math.log(known),
            warps=WARPS, V=x.shape[1], CAPPED=caps[0] is not None, CAPPED_Y=caps[1] is not None, BV=TILE,
        )  # fmt: skip
    return losses


def cross_entropy_(x: Tensor, targets: Tensor, scale: float, cap: float | None) -> Tensor:
    """-log q of each token's target, float32 [T]; x becomes its gradient.

    Args:
        x: [T, V] before scale and cap; contiguous.
        targets: int64 [T], from 0 to V - 1.
        scale: of the logits.
        cap: None for none.
    """
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        launch(
            cross_entropy_kernel, (len(x),), x, targets, losses, scale, cap or 0.0,
            warps=WARPS, V=x.shape[1], CAPPED=cap is not None, BV=TILE,
        )  # fmt: skip
    return losses


@triton.jit
def load_logits(x, at, scale, cap, V: tl.constexpr, CAPPED: tl.constexpr):
    """z, and dz / dx; -inf and 0 beyond V."""
    inside = at < V
    b_z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    b_slope = tl.zeros_like(b_z) + scale
    if CAPPED:
        b_t = 2.0 * tl.sigmoid(2.0 * b_z / cap) - 1.0
        b_z, b_slope = cap * b_t, scale * (1.0 - b_t * b_t)
    return tl.where(inside, b_z, float("-inf")), b_slope


@triton.jit
def log_sum_exp(x, scale, cap, V: tl.constexpr, CAPPED: tl.constexpr, BV: tl.constexpr):
    """log(sum(exp(z))) of a row."""
    v = tl.arange(0, BV)
    b_most = tl.full([BV], float("-inf"), tl.float32)
    b_sum = tl.zeros([BV], tl.float32)
    for first in range(0, V, BV):
        b_z, _ = load_logits(x, first + v, scale, cap, V, CAPPED)
        b_new = tl.maximum(tl.maximum(b_most, b_z), -1e38)  # columns beyond V have none
        b_sum = b_sum * tl.exp(b_most - b_new) + tl.exp(b_z - b_new)
        b_most = b_new
    most = tl.max(b_most, 0)
    return most + tl.log(tl.sum(b_sum * tl.exp(b_most - most), 0))


@triton.jit
def one_logit(x, at, scale, cap, V: tl.constexpr, CAPPED: tl.constexpr):
    """z of one column."""
    b_z, _ = load_logits(x, at + tl.arange(0, 1), scale, cap, V, CAPPED)
    return tl.max(b_z, 0)


@triton.jit(do_not_specialize=["scale", "scale_y", "cap", "cap_y", "log_known"])
def divergence_kernel(
    x, y, losses, answers, scale, scale_y, cap, cap_y, log_known,
    V: tl.constexpr, CAPPED: tl.constexpr, CAPPED_Y: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """loss = sum_v p_v (log p_v - log q_v), x <- (q - p) dz/dx; where an answer is told, p is 1 there.

    Grid (T). Bytes of a bfloat16 logit: 10, x and y twice and the gradient. Tiles: 2048 logits, of which a thread of 8
    warps has 8 of each row, 16 bytes; a row may be of any length."""
    row = tl.program_id(0).to(tl.int64)
    x, y = x + row * V, y + row * V
    whole = log_sum_exp(x, scale, cap, V, CAPPED, BV)
    whole_y = log_sum_exp(y, scale_y, cap_y, V, CAPPED_Y, BV)
    answer, told = -1, False
    if answers is not None:
        answer = tl.load(answers + row)
        told = (answer >= 0) & (one_logit(y, tl.maximum(answer, 0), scale_y, cap_y, V, CAPPED_Y) < whole_y + log_known)
    v = tl.arange(0, BV)
    b_loss = tl.zeros([BV], tl.float32)
    for first in range(0, V, BV):
        inside = first + v < V
        b_z, b_slope = load_logits(x, first + v, scale, cap, V, CAPPED)
        b_y, _ = load_logits(y, first + v, scale_y, cap_y, V, CAPPED_Y)
        b_log_q, b_log_p = b_z - whole, b_y - whole_y
        b_p = tl.exp(b_log_p)
        if answers is not None:
            b_log_p = tl.where(told, 0.0, b_log_p)
            b_p = tl.where(told, (first + v == answer).to(tl.float32), b_p)
        b_loss += tl.where(b_p != 0.0, b_p * (b_log_p - b_log_q), 0.0)  # NaN is not 0
        b_grad = (tl.exp(b_log_q) - b_p) * b_slope
        tl.store(x + first + v, b_grad.to(x.dtype.element_ty), mask=inside)
    tl.store(losses + row, tl.sum(b_loss, 0))


@triton.jit(do_not_specialize=["scale", "cap"])
def cross_entropy_kernel(
    x, targets, losses, scale, cap, V: tl.constexpr, CAPPED: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """loss = -log q_target, x <- (q - onehot(target)) dz/dx.

    Grid (T). Bytes of a bfloat16 logit: 6, x twice and the gradient. Tiles: as `divergence_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    x += row * V
    target = tl.load(targets + row)
    whole = log_sum_exp(x, scale, cap, V, CAPPED, BV)
    v = tl.arange(0, BV)
    b_loss = tl.zeros([BV], tl.float32)
    for first in range(0, V, BV):
        b_z, b_slope = load_logits(x, first + v, scale, cap, V, CAPPED)
        b_hit = first + v == target
        b_loss += tl.where(b_hit, whole - b_z, 0.0)
        b_grad = (tl.exp(b_z - whole) - b_hit.to(tl.float32)) * b_slope
        tl.store(x + first + v, b_grad.to(x.dtype.element_ty), mask=first + v < V)
    tl.store(losses + row, tl.sum(b_loss, 0))
