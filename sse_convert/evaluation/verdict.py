"""What the figures of an evaluation come to, in words: one sentence, and whether the model may be published.

    grade       loss above the teacher's, nats    share of what the teacher finds
    keeps       at most 0.05                      at least 95%
    loses       at most 0.3                       at least 70%
    damaged     worse than that
    destroyed   not finite, or surely above 2, or above that of guessing every token alike where the teacher's is not
    unknown     neither loss nor needles that the teacher finds were measured, or the teacher hardly predicts the text

The loss is that of the worst window length. Needles are pooled over the settings where the teacher itself finds 60%
or more. What is not measured does not count.
"""

import dataclasses as dc
import math
from collections.abc import Iterator
from typing import Literal

from sse_convert.errors import VerificationError
from sse_convert.evaluation.figures import Figures, LossGap
from sse_convert.evaluation.intervals import Z95, share_interval
from sse_convert.evaluation.retrieval import NeedleScore
from sse_convert.surgery.guessing import guesses

Grade = Literal["keeps", "loses", "damaged", "destroyed", "unknown"]
LIMITS: tuple[tuple[Grade, float, float], ...] = (("keeps", 0.05, 0.95), ("loses", 0.3, 0.7))
"""grade, largest loss gap in nats per token, smallest share of the teacher's needles"""
DESTROYED_GAP = 2.0
"""nats per token: a model that is e^2 = 7.4 times as perplexed as its teacher"""
TEACHER_CAN = 0.6
"""the teacher's own share of needles from which a setting counts"""
SHOWN = 6
"""settings named in a note"""
HEADS: dict[Grade, str] = {
    "keeps": "keeps the teacher's quality",
    "loses": "loses a part of the teacher's quality",
    "damaged": "damaged",
    "destroyed": "destroyed",
}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ModelVerdict:
    """What an evaluation comes to."""

    grade: Grade
    """see the top of this module"""
    text: str
    """the verdict in words"""
    notes: tuple[str, ...] = ()
    """what the verdict leaves out"""

    @property
    def destroyed(self) -> bool:
        """Whether the model is not fit to be published."""
        return self.grade == "destroyed"

    def line(self) -> str:
        """The verdict as a line of output."""
        return f"verdict: {self.text}"

    def require_sound(self, fix: str) -> None:
        """Fail for a destroyed model.

        Args:
            fix: what to do about it.

        Raises:
            VerificationError: the model is destroyed.
        """
        if self.destroyed:
            raise VerificationError(
                self.text,
                expected=f"a finite loss, less than {DESTROYED_GAP:g} nats above the teacher's, better than guessing",
                fix=fix,
            )


def model_verdict(report: Figures) -> ModelVerdict:
    """Judge a model by its evaluation."""
    gap, share = _worst_gap(report), _share(report)
    grade, notes = _grade(report, gap, share[0] if share else None), _notes(report)
    if grade != "destroyed" and (loss := guessing(report)) is not None:
        text = (
            f"none: the teacher's own loss is {loss:.2f} nats, no better than guessing: check its weights and the text"
        )
        return ModelVerdict(grade="unknown", text=text, notes=notes)
    if grade == "unknown":
        text = "none: neither a loss nor needles that the teacher finds were measured"
        return ModelVerdict(grade=grade, text=text, notes=notes)
    parts = [*([share[1]] if share else []), *_loss_words(report, gap)]
    parts += [] if share else ["retrieval not measured"]
    text = f"{HEADS[grade]}: {', '.join(parts)}" + ("; not offered for push" if grade == "destroyed" else "")
    return ModelVerdict(grade=grade, text=text, notes=notes)


def _notes(report: Figures) -> tuple[str, ...]:
    """What is to be known beside the verdict."""
    context = report.conditions.get("teacher_context")
    if context is None or max((size.length for size in report.cache), default=0) <= context:
        return tuple(_left_out(report))
    beyond = f"the teacher was trained for {context:,} positions; figures beyond them are of it as it is"
    return (*_left_out(report), beyond)


def _grade(report: Figures, gap: LossGap | None, share: float | None) -> Grade:
    if not _finite(report) or _guesses(report):
        return "destroyed"
    if gap is None and share is None:
        return "unknown"
    if gap is not None and gap.gap - Z95 * (gap.gap_se or 0.0) > DESTROYED_GAP:
        return "destroyed"
    loss, found = -math.inf if gap is None else gap.gap, math.inf if share is None else share
    return next((grade for grade, most, least in LIMITS if loss <= most and found >= least), "damaged")


def _finite(report: Figures) -> bool:
    """Whether every loss of the model is a number."""
    return all(math.isfinite(entry.loss) for entry in report.student.held_out)


def _guesses(report: Figures) -> bool:
    """Whether the loss is above ln V, that of equal chances for V tokens, at a length where the teacher's is not."""
    vocabulary = report.conditions.get("vocab_size")
    pairs = zip(report.teacher.held_out, report.student.held_out, strict=True)
    return vocabulary is not None and any(t.loss < math.log(vocabulary) < s.loss < math.inf for t, s in pairs)


def guessing(report: Figures) -> float | None:
    """The teacher's largest loss, in nats, if it is no better than guessing."""
    vocabulary = report.conditions.get("vocab_size")
    losses = [entry.loss for entry in report.teacher.held_out]
    worst = max(losses, default=0.0) if all(map(math.isfinite, losses)) else math.inf
    return worst if vocabulary is not None and guesses(worst, vocabulary) else None


def _worst_gap(report: Figures) -> LossGap | None:
    gaps = [gap for gap in report.loss_gaps if math.isfinite(gap.gap)]
    return max(gaps, key=lambda gap: gap.gap, default=None)


def _loss_words(report: Figures, gap: LossGap | None) -> Iterator[str]:
    if not _finite(report):
        yield "its loss is not finite"
    elif gap is not None:
        error = "" if gap.gap_se is None else f" ± {Z95 * gap.gap_se:.3f}"
        side = "below" if gap.gap < 0 else "above"
        yield f"loss {abs(gap.gap):.3f}{error} nats {side} the teacher's at {gap.length:,} tokens"
    if _guesses(report):
        yield "worse than guessing"


def _share(report: Figures) -> tuple[float, str] | None:
    """What the model finds of the needles that the teacher finds, with the words for it; None where it finds none."""
    pairs = [(t.total, s.total) for t, s in _needles(report) if _can(t)]
    if not pairs:
        return None
    of_correct, of_samples = (sum(getattr(t, name) for t, _ in pairs) for name in ("correct", "samples"))
    correct, samples = (sum(getattr(s, name) for _, s in pairs) for name in ("correct", "samples"))
    share = (correct / samples) / (of_correct / of_samples)
    low, high = share_interval(correct, samples, of_correct, of_samples)
    return share, f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}] of its needles"


def _needles(report: Figures) -> Iterator[tuple[NeedleScore, NeedleScore]]:
    yield from zip(report.teacher.needles, report.student.needles, strict=True)


def _can(teacher: NeedleScore) -> bool:
    return bool(teacher.total.samples) and teacher.total.value >= TEACHER_CAN


def _left_out(report: Figures) -> Iterator[str]:
    """Settings that say nothing of the conversion, because the teacher fails them."""
    settings = [
        f"{t.kind} among {t.keys} at {t.length:,} ({t.total.value:.0%})"
        for t, _ in _needles(report)
        if t.total.samples and not _can(t)
    ]
    if settings:
        more = f" and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
        named = ", ".join(settings[:SHOWN])
        yield f"the teacher itself finds less than {TEACHER_CAN:.0%}, so the verdict leaves out: {named}{more}"
