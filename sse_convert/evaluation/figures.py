"""What an evaluation measures: both models, and the student's gaps to its teacher. `report.py` says it."""

import dataclasses as dc
from typing import Any

from sse_convert.evaluation.agreement import Agreement
from sse_convert.evaluation.harness import TaskScore
from sse_convert.evaluation.perplexity import HeldOutLoss, loss_gap
from sse_convert.evaluation.retrieval import NeedleScore
from sse_convert.evaluation.throughput import Speed


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """Everything measured on one model."""

    name: str
    """folder or hub id"""
    parameters: int
    """number of parameters"""
    dtype: str
    """type of the weights during the measurement"""
    held_out: tuple[HeldOutLoss, ...] = ()
    """loss, one entry per window length"""
    needles: tuple[NeedleScore, ...] = ()
    """retrieval, one entry per length, kind and number of keys"""
    agreement: tuple[Agreement, ...] = ()
    """KL and top-1 agreement with the teacher, one entry per window length; none for the teacher"""
    tasks: tuple[TaskScore, ...] = ()
    """tasks of the lm-evaluation-harness, one entry per metric"""
    speed: tuple[Speed, ...] = ()
    """tokens per second and cache bytes, one entry per context length"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = {field.name: getattr(self, field.name) for field in dc.fields(self)}
        return {
            name: [score.to_dict() for score in value] if isinstance(value, tuple) else value
            for name, value in values.items()
        }


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Bytes of the cache for one sequence, by formula."""

    length: int
    """tokens of context"""
    teacher_bytes: int
    """keys and values of the teacher"""
    student_bytes: int
    """keys, values and states of the student"""
    student_state_bytes: int
    """of these, states: they do not grow"""


@dc.dataclass(frozen=True, slots=True)
class LossGap:
    """Student minus teacher on windows of one length."""

    length: int
    """tokens per window"""
    gap: float
    """nats per token"""
    gap_se: float | None
    """standard error from paired windows, None with one window"""


@dc.dataclass(frozen=True, slots=True)
class Retention:
    """What the student finds of what the teacher finds, in one setting of needles."""

    kind: str
    """kind of the values"""
    keys: int
    """needles in the text"""
    length: int
    """tokens per row"""
    teacher: float
    """the teacher's accuracy"""
    student: float
    """the student's"""
    share: float | None
    """student / teacher; None where the teacher finds none"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Teacher beside student, as it was just measured or was stored."""

    teacher: ModelScores
    """the model that was converted"""
    student: ModelScores
    """the converted model"""
    loss_gaps: tuple[LossGap, ...]
    """from `paired_gaps`, one per window length"""
    cache: tuple[CacheSize, ...]
    """bytes by context length"""
    conditions: dict[str, Any]
    """machine, versions, text, seeds"""

    def retention(self) -> list[Retention]:
        """The student's needles beside the teacher's, by setting."""
        rows = []
        for teacher, student in zip(self.teacher.needles, self.student.needles, strict=True):
            share = student.total.value / teacher.total.value if teacher.total.correct else None
            accuracies = teacher.total.value, student.total.value
            rows.append(Retention(teacher.kind, teacher.keys, teacher.length, *accuracies, share))
        return rows


def paired_gaps(teacher: ModelScores, student: ModelScores) -> tuple[LossGap, ...]:
    """Student minus teacher by window length, of two models that were just measured on the same windows."""
    pairs = zip(teacher.held_out, student.held_out, strict=True)
    return tuple(LossGap(t.length, *loss_gap(s, t)) for t, s in pairs)
