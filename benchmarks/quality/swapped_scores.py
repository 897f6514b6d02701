"""Held-out loss and needles of a model with swapped layers, and of the same model that forgets every few tokens."""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.quality.swapped_states import Bed, States, arguments, climb
from sse_convert.data.needle import NeedleSample
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.modeling.head import Head
from sse_convert.modeling.layout import LAYOUT, document_layout
from sse_convert.training.losses import linear_cross_entropy


@torch.no_grad()
def text_scores(student: PreTrainedModel, bed: Bed, *, reset_every: int | None = None) -> list[dict[str, Any]]:
    """Held-out loss and the gap to the teacher in nats per token, by row length.

    Args:
        student: the model with swapped layers.
        bed: rows and the teacher's states.
        reset_every: swapped recurrent layers start anew after so many tokens; windows see on.
    """
    student.eval()
    found = []
    for length, states in bed.text.items():
        own, teacher = _losses(student, bed, states, reset_every)
        found.append({"length": length, "loss": own, "teacher": teacher, "gap": own - teacher})
    return found


@torch.no_grad()
def needle_scores(student: PreTrainedModel, bed: Bed, *, reset_every: int | None = None) -> list[dict[str, Any]]:
    """Needles found by length, kind and number of keys, with Wilson intervals. Arguments as of `text_scores`.

    The loss of their answers (nats per token) tells variants apart that find none or next to none.
    """
    student.eval()
    scores = []
    for samples, states in bed.needles:
        own, teacher = _found(student, bed, samples, states, reset_every)
        setting = {"kind": samples[0].kind, "keys": samples[0].keys, "length": len(samples[0].token_ids)}
        losses = {"answer_loss": own.loss, "teacher_answer_loss": teacher.loss}
        scores.append({**setting, **own.accuracy.to_dict(), "teacher": teacher.accuracy.value, **losses})
    return scores


@dc.dataclass(slots=True)
class _Answers:
    """What a model makes of the answers of some samples."""

    samples: int = 0
    right: int = 0
    tokens: int = 0
    nats: float = 0.0

    def add(self, logits_TV: Tensor, answer_T: Tensor) -> None:
        self.samples += 1
        self.right += bool((logits_TV.argmax(-1) == answer_T).all())
        self.tokens += len(answer_T)
        self.nats += float(F.cross_entropy(logits_TV.float(), answer_T, reduction="sum"))

    @property
    def accuracy(self) -> Accuracy:
        """Answers right token by token."""
        return Accuracy(self.right, self.samples)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def _climb(student: PreTrainedModel, bed: Bed, states: States, reset_every: int | None) -> Tensor:
    rows, length = states.ids_RT.shape
    given = arguments(student, rows, length)
    if reset_every is not None:
        starts = torch.zeros(rows, length, dtype=torch.bool, device=student.device)
        starts[:, ::reset_every] = True
        given[LAYOUT] = document_layout(starts)
    cuda = student.device.type == "cuda"
    with torch.autocast(student.device.type, torch.bfloat16, enabled=cuda):
        return climb(student, states.first_RTD, bed.first, given)


def _losses(student: PreTrainedModel, bed: Bed, states: States, reset_every: int | None) -> tuple[float, float]:
    sums = torch.zeros(2, dtype=torch.float64)
    for part in states.batches():
        targets = part.ids_RT[:, 1:].flatten().long().to(student.device)
        both = (student, _climb(student, bed, part, reset_every)), (bed.teacher, part.last_RTD)
        for i, (model, hidden) in enumerate(both):
            hidden = hidden[:, :-1].flatten(0, 1).to(bed.teacher.dtype)
            sums[i] += float(linear_cross_entropy(hidden, Head.of(model), targets))
    own, teacher = (sums / (states.ids_RT.shape[0] * (states.ids_RT.shape[1] - 1))).tolist()
    return own, teacher


def _found(
    student: PreTrainedModel, bed: Bed, samples: list[NeedleSample], states: States, reset_every: int | None
) -> tuple[_Answers, _Answers]:
    """The student's answers and the teacher's."""
    answers = _Answers(), _Answers()
    left = iter(samples)
    for part in states.batches():
        both = (student, _climb(student, bed, part, reset_every)), (bed.teacher, part.last_RTD)
        for row, ids in enumerate(part.ids_RT):
            length = next(left).answer_len
            answer = ids[-length:].long().to(student.device)
            for found, (model, hidden) in zip(answers, both, strict=True):
                found.add(Head.of(model).logits(hidden[row, -length - 1 : -1].to(bed.teacher.dtype)), answer)
    return answers
