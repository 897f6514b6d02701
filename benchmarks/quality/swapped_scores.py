"""Held-out loss and needles of a model with swapped layers, and of the same model that forgets every few tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.quality.swapped_states import Bed, States, arguments, climb
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.evaluation.needle import NeedleSample
from sse_convert.modeling.hybrid import LAYOUT
from sse_convert.modeling.layout import document_layout
from sse_convert.training.losses import Head, linear_cross_entropy


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
    """Needles found by length, kind and number of keys, with Wilson intervals. Arguments as of `text_scores`."""
    student.eval()
    scores = []
    for samples, states in bed.needles:
        own, teacher = _found(student, bed, samples, states, reset_every)
        setting = {"kind": samples[0].kind, "keys": samples[0].keys, "length": len(samples[0].token_ids)}
        scores.append({**setting, **own.to_dict(), "teacher": teacher.value})
    return scores


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
) -> tuple[Accuracy, Accuracy]:
    """How many answers are right token by token, the student's and the teacher's."""
    hits = [0, 0]
    left = iter(samples)
    for part in states.batches():
        both = (student, _climb(student, bed, part, reset_every)), (bed.teacher, part.last_RTD)
        for row, ids in enumerate(part.ids_RT):
            answer = next(left).answer_len
            for i, (model, hidden) in enumerate(both):
                logits = Head.of(model).logits(hidden[row, -answer - 1 : -1].to(bed.teacher.dtype))
                hits[i] += bool((logits.argmax(-1).cpu() == ids[-answer:]).all())
    return Accuracy(hits[0], len(samples)), Accuracy(hits[1], len(samples))
