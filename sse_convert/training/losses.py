"""Losses that never hold the logits of a whole batch, and the errors between hidden states.

Shapes: T tokens, D hidden width, V vocabulary. Everything is a sum over tokens in float32 (float64 for float64 inputs);
whoever calls divides once by the tokens of the whole step, so splitting a batch changes nothing.

No library's loss is taken: cut-cross-entropy and Liger have no KL with soft caps, scaled logits and biases (and Liger's
sums the head's gradient in the weight's dtype, over as many chunks as the vocabulary is wider than the model). On a GPU
a kernel of our own does what follows a chunk's matrix product.
"""

import dataclasses as dc
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sse_convert.data.packing import IGNORED
from sse_convert.errors import ShapeError
from sse_convert.kernels.triton_backend import GPU, unavailable_reason
from sse_convert.modeling.head import Head, token_chunks, wide
from sse_convert.modeling.logits import CE_BYTES, FUSED_BYTES, KL_BYTES

KNOWN = 0.5
"""a teacher that gives an answer this probability knows it"""


def linear_cross_entropy(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Summed cross entropy of the targets in nats, 0-d.

    Logits exist for one chunk of tokens at a time; gradients are made in the forward pass, while they do.

    Args:
        hidden: [T, D] final hidden states.
        head: makes the logits.
        targets: int64 [T], -100 where there is nothing to predict.

    Raises:
        ShapeError: hidden, head and targets disagree.
    """
    _check(hidden, head)
    if targets.shape != hidden.shape[:1]:
        raise ShapeError(f"targets have shape {tuple(targets.shape)}", expected=f"({hidden.shape[0]},)")
    kept = targets != IGNORED
    kind = _FusedCrossEntropy if _fuses(hidden) else _CrossEntropy
    return summed(hidden[kept].to(compute_dtype(hidden)), head, kind(targets[kept]))


def linear_kl(
    hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head, answers: Tensor | None = None
) -> Tensor:
    """Summed KL(teacher || student), in nats, 0-d. No gradient reaches the teacher.

    Args:
        hidden: [T, D] the student's final hidden states.
        head: the student's head.
        teacher_hidden: [T, D'] the teacher's.
        teacher_head: the teacher's head, with the same V.
        answers: int64 [T], the token that is sure to follow, -100 elsewhere. Where the teacher gives it less than
            half, cross entropy of that token takes the place of the divergence.

    Raises:
        ShapeError: lengths or vocabularies disagree.

    Source: forward KL at temperature 1 with gradient p_student - p_teacher, as in knowledge distillation.
    """
    _check(hidden, head)
    _check(teacher_hidden, teacher_head)
    if head.weight.shape[0] != teacher_head.weight.shape[0]:
        raise ShapeError(
            f"the student predicts {head.weight.shape[0]} tokens, the teacher {teacher_head.weight.shape[0]}",
            expected="one vocabulary",
            fix="distil from the model the student was converted from",
        )
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise ShapeError(
            f"{hidden.shape[0]} student tokens, {teacher_hidden.shape[0]} teacher tokens", expected="the same tokens"
        )
    dtype = compute_dtype(hidden)
    teacher = teacher_hidden.detach().to(dtype), teacher_head.in_dtype(dtype)
    kind = _FusedDivergence if _fuses(hidden) else _Divergence
    return summed(hidden.to(dtype), head, kind(*teacher, answers))


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error and the target's own square, both summed over tokens and averaged over the width, 0-d.

    Args:
        output: [..., D], differentiable.
        target: [..., D].
    """
    target = wide(target.detach())
    width = target.shape[-1]
    return (wide(output) - target).square().sum() / width, target.square().sum() / width


class ChunkLoss(Protocol):
    """Loss of a chunk of tokens."""

    @property
    def logit_bytes(self) -> int:
        """Bytes per logit that it takes, the logits themselves among them."""

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        """The loss, 0-d, and the gradient of x.

        Args:
            part: where the chunk is.
            x: [t, V] what the head's linear part makes of it; may be overwritten.
            head: finishes the logits.
        """


def _fuses(hidden: Tensor) -> bool:
    return hidden.device.type == GPU and hidden.dtype != torch.float64 and unavailable_reason(hidden.device) is None


@dc.dataclass(frozen=True, slots=True)
class _CrossEntropy:
    targets: Tensor
    logit_bytes: int = CE_BYTES

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        logits, index = head.finished(x), self.targets[part, None]
        log_q = torch.log_softmax(logits, -1)
        loss = -log_q.gather(1, index).sum()
        grad = log_q.exp_().scatter_add_(1, index, -torch.ones_like(index, dtype=log_q.dtype))
        return loss, head.linear_grad(grad, logits)


@dc.dataclass(frozen=True, slots=True)
class _FusedCrossEntropy:
    targets: Tensor
    logit_bytes: int = FUSED_BYTES

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        from sse_convert.kernels.triton.logit_losses import cross_entropy_

        return cross_entropy_(x, self.targets[part], head.scale, head.cap).sum(), x


@dc.dataclass(frozen=True, slots=True)
class _Divergence:
    hidden: Tensor
    teacher: Head
    answers: Tensor | None
    logit_bytes: int = KL_BYTES

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        logits = head.finished(x)
        log_p = torch.log_softmax(self.teacher.logits(self.hidden[part]), -1)
        log_q = torch.log_softmax(logits, -1)
        p = log_p.exp()
        if self.answers is not None:
            log_p, p = _corrected(log_p, p, self.answers[part, None])
        loss = log_p.sub_(log_q).mul_(p).sum()
        return loss, head.linear_grad(log_q.exp_().sub_(p), logits)


def _corrected(log_p: Tensor, p: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's distribution [t, V], all of it on the answer [t, 1] where it gives that less than half."""
    index = answers.clamp_min(0)
    doubtful = (answers != IGNORED) & (p.gather(1, index) < KNOWN)
    told = torch.zeros_like(p).scatter_(1, index, 1.0)
    return log_p.masked_fill(doubtful, 0.0), torch.where(doubtful, told, p)


@dc.dataclass(frozen=True, slots=True)
class _FusedDivergence:
    hidden: Tensor
    teacher: Head
    answers: Tensor | None
    logit_bytes: int = FUSED_BYTES

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        from sse_convert.kernels.triton.logit_losses import divergence_

        y = self.teacher.linear(self.hidden[part])
        answers = None if self.answers is None else self.answers[part]
        scales, caps = (head.scale, self.teacher.scale), (head.cap, self.teacher.cap)
        return divergence_(x, y, scales, caps, answers, KNOWN).sum(), x


def summed(hidden: Tensor, head: Head, chunk_loss: ChunkLoss) -> Tensor:
    """A loss summed over chunks of hidden states [T, D], 0-d, with gradients for them and for the head."""
    result: Tensor = _ChunkedLoss.apply(hidden, head.weight, head.bias, head, chunk_loss)  # type: ignore[no-untyped-call]
    return result


class _ChunkedLoss(torch.autograd.Function):
    """Sum of a per-chunk loss over chunks of tokens, with gradients for hidden states, head weight and head bias."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, chunk_loss: Any) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        any_grad = needs_hidden or needs_weight or needs_bias
        cast = head.in_dtype(hidden.dtype)
        accumulate = wide(hidden.new_empty(0)).dtype
        total = torch.zeros((), dtype=accumulate, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=accumulate) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=accumulate) if bias is not None and needs_bias else None
        for part in token_chunks(hidden.shape[0], weight.shape[0], hidden.device, chunk_loss.logit_bytes):
            loss, grad = chunk_loss(part, cast.linear(hidden[part]), head)
            total += loss
            if any_grad:
                grad = grad.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(grad, cast.weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += grad.t() @ hidden[part]
            if d_bias is not None:
                d_bias += grad.sum(0, dtype=accumulate)
            del grad  # the next chunk's logits take its place
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_weight is None else d_weight.mul_(grad).to(weight_dtype),
            None if d_bias is None else d_bias.mul_(grad).to(bias_dtype),
            None,
            None,
        )


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype matrix products run in here: autocast's if that is on, else hidden's."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _check(hidden: Tensor, head: Head) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise ShapeError(
            f"hidden states have shape {tuple(hidden.shape)}", expected=f"(tokens, {head.weight.shape[1]})"
        )
