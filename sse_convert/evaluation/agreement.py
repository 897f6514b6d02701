"""How close a student's predictions are to its teacher's, by position: KL(teacher || student) and top-1 agreement.

The teacher is measured first; its final hidden states wait in the machine's memory until the student has read the same
text, so that the two models are never on the device together, and logits exist for a few positions at a time.
"""

import dataclasses as dc
import itertools

import torch
from torch import Tensor

from sse_convert.errors import CheckpointError
from sse_convert.evaluation.intervals import Z95, ratio_standard_error
from sse_convert.evaluation.perplexity import Windows
from sse_convert.modeling.head import Head, token_chunks


@dc.dataclass(frozen=True, slots=True)
class PositionAgreement:
    """Agreement of the predictions with a similar amount of context."""

    start: int
    """fewest tokens of context"""
    stop: int
    """most tokens of context, plus one"""
    tokens: int
    """predictions"""
    kl: float
    """KL(teacher || student) in nats per token"""
    kl_se: float | None
    """standard error over windows, None with one window"""
    top1: float
    """share of predictions whose likeliest token is the teacher's"""
    top1_se: float | None
    """standard error over windows, None with one window"""


@dc.dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a student with its teacher on windows of one length."""

    length: int
    """tokens per window"""
    windows: int
    """windows"""
    tokens: int
    """predictions"""
    kl: float
    """KL(teacher || student) in nats per token, over all positions"""
    kl_se: float | None
    """standard error over windows, None with one window"""
    top1: float
    """share of predictions whose likeliest token is the teacher's, over all positions"""
    top1_se: float | None
    """standard error over windows, None with one window"""
    buckets: tuple[PositionAgreement, ...]
    """by tokens of context"""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready, with 95% intervals (normal)."""
        data = dc.asdict(self)
        buckets = data.pop("buckets")
        for name in ("kl", "top1"):
            spread = None if data[f"{name}_se"] is None else Z95 * data[f"{name}_se"]
            data[f"{name}_low"] = None if spread is None else data[name] - spread
            data[f"{name}_high"] = None if spread is None else data[name] + spread
        return {**data, "buckets": list(buckets)}


class TeacherStates:
    """What a teacher said about windows; give it to `held_out_loss` as `watch`."""

    def __init__(self) -> None:
        self.hidden: list[Tensor] = []
        self.head: Head | None = None

    def __call__(self, rows: slice, hidden: Tensor, head: Head) -> None:
        """Keep the hidden states [rows, T - 1, D]; rows come in order."""
        self.hidden += hidden.cpu().unbind()
        if self.head is None:
            self.head = _head_to(head, torch.device("cpu"))


class Comparison:
    """Compares a student with the teacher's states on the same windows; give it to `held_out_loss` as `watch`."""

    def __init__(self, windows: Windows, teacher: TeacherStates) -> None:
        rows, length = windows.input_ids.shape
        self._windows = windows
        self._teacher = teacher
        self._head: Head | None = None
        self._kl = torch.zeros(rows, length - 1, dtype=torch.float64)
        self._same = torch.zeros(rows, length - 1, dtype=torch.float64)

    def __call__(self, rows: slice, hidden: Tensor, head: Head) -> None:
        """Compare the hidden states [rows, T - 1, D] with the teacher's."""
        if self._head is None:
            assert self._teacher.head is not None, "the teacher comes first"
            self._head = _head_to(self._teacher.head, hidden.device)
        known = torch.stack(self._teacher.hidden[rows]).to(hidden.device)
        kl, same = divergence(hidden.flatten(0, 1), head, known.flatten(0, 1), self._head)
        self._kl[rows] = kl.double().view(hidden.shape[:2]).cpu()
        self._same[rows] = same.double().view(hidden.shape[:2]).cpu()

    def result(self) -> Agreement:
        """The summary, after all windows."""
        edges, bucket = self._windows.edges, self._windows.bucket
        rows, length = self._windows.input_ids.shape
        buckets = [
            PositionAgreement(start, stop, *self._part(bucket == i))
            for i, (start, stop) in enumerate(itertools.pairwise(edges))
            if (bucket == i).any()
        ]
        return Agreement(length, rows, *self._part(bucket >= 0), tuple(buckets))

    def _part(self, chosen: Tensor) -> tuple[int, float, float | None, float, float | None]:
        """Of the predictions chosen: how many there are, KL and top-1 agreement, each with its standard error."""
        counts = chosen.sum(1).tolist()
        tokens = sum(counts)
        sums = [torch.where(chosen, values, 0.0).sum(1).tolist() for values in (self._kl, self._same)]
        kl, same = ((sum(s) / tokens, ratio_standard_error(s, counts)) for s in sums)
        return tokens, *kl, *same


def divergence(hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) in nats, and whether both would choose the same token, for each position.

    Args:
        hidden: [P, D] the student's final hidden states.
        head: the student's head.
        teacher_hidden: [P, D'] the teacher's.
        teacher_head: the teacher's head.

    Returns:
        float [P] and bool [P].

    Raises:
        CheckpointError: the two predict different vocabularies.
    """
    if head.weight.shape[0] != teacher_head.weight.shape[0]:
        raise CheckpointError(
            f"the student predicts {head.weight.shape[0]} tokens, the teacher {teacher_head.weight.shape[0]}",
            expected="one vocabulary",
            fix="compare with the model that the student was made from",
        )
    parts: list[tuple[Tensor, Tensor]] = []
    for part in token_chunks(len(hidden), head.weight.shape[0], hidden.device):
        log_p = torch.log_softmax(teacher_head.logits(teacher_hidden[part]), -1)
        log_q = torch.log_softmax(head.logits(hidden[part]), -1)
        same = log_p.argmax(-1) == log_q.argmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts.append((kl, same))
    return torch.cat([kl for kl, _ in parts]), torch.cat([same for _, same in parts])


def _head_to(head: Head, device: torch.device) -> Head:
    bias = None if head.bias is None else head.bias.detach().to(device)
    return dc.replace(head, weight=head.weight.detach().to(device), bias=bias)
