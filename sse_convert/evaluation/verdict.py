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
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sse_convert.errors import VerificationError
from sse_convert.evaluation.intervals import Z95, share_interval
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


def model_verdict(report: Mapping[str, Any]) -> ModelVerdict:
    """Judge a model by its evaluation.

    Args:
        report: `EvalReport.to_dict()`, or what was read from an evaluation.json.
    """
    gap, share = _worst_gap(report), _share(report)
    grade = _grade(report, gap, share[0] if share else None)
    if grade != "destroyed" and (loss := guessing(report)) is not None:
        text = (
            f"none: the teacher's own loss is {loss:.2f} nats, no better than guessing: check its weights and the text"
        )
        return ModelVerdict(grade="unknown", text=text, notes=_notes(report))
    if grade == "unknown":
        text = "none: neither a loss nor needles that the teacher finds were measured"
        return ModelVerdict(grade=grade, text=text, notes=_notes(report))
    parts = [*([share[1]] if share else []), *_loss_words(report, gap)]
    parts += [] if share else ["retrieval not measured"]
    text = f"{HEADS[grade]}: {', '.join(parts)}" + ("; not offered for push" if grade == "destroyed" else "")
    return ModelVerdict(grade=grade, text=text, notes=_notes(report))


def _notes(report: Mapping[str, Any]) -> tuple[str, ...]:
    """What is to be known beside the verdict."""
    context = report["conditions"].get("teacher_context")
    if context is None or max((row["length"] for row in report["cache"]), default=0) <= context:
        return tuple(_left_out(report))
    beyond = f"the teacher was trained for {context:,} positions; figures beyond them are of it as it is"
    return (*_left_out(report), beyond)


def _grade(report: Mapping[str, Any], gap: Mapping[str, Any] | None, share: float | None) -> Grade:
    if not _finite(report) or _guesses(report):
        return "destroyed"
    if gap is None and share is None:
        return "unknown"
    if gap is not None and gap["gap"] - Z95 * (gap["gap_se"] or 0.0) > DESTROYED_GAP:
        return "destroyed"
    loss, found = -math.inf if gap is None else gap["gap"], math.inf if share is None else share
    return next((grade for grade, most, least in LIMITS if loss <= most and found >= least), "damaged")


def _finite(report: Mapping[str, Any]) -> bool:
    """Whether every loss of the model is a number; JSON has null for the others."""
    return all(entry["loss"] is not None for entry in report["student"]["held_out"])


def _guesses(report: Mapping[str, Any]) -> bool:
    """Whether the loss is above ln V, that of equal chances for V tokens, at a length where the teacher's is not."""
    vocabulary = report["conditions"].get("vocab_size")
    pairs = zip(report["teacher"]["held_out"], report["student"]["held_out"], strict=True)
    losses = [(t["loss"], s["loss"]) for t, s in pairs if None not in (t["loss"], s["loss"])]
    return vocabulary is not None and any(t < math.log(vocabulary) < s for t, s in losses)


def guessing(report: Mapping[str, Any]) -> float | None:
    """The teacher's largest loss, in nats, if it is no better than guessing."""
    vocabulary = report["conditions"].get("vocab_size")
    losses = [row["loss"] for row in report["teacher"]["held_out"]]
    worst = math.inf if None in losses else max(losses, default=0.0)
    return worst if vocabulary is not None and guesses(worst, vocabulary) else None


def _worst_gap(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    gaps = [row for row in report["loss_gaps"] if row["gap"] is not None]
    return max(gaps, key=lambda row: float(row["gap"]), default=None)


def _loss_words(report: Mapping[str, Any], gap: Mapping[str, Any] | None) -> Iterator[str]:
    if not _finite(report):
        yield "its loss is not finite"
    elif gap is not None:
        error = "" if gap["gap_se"] is None else f" ± {Z95 * gap['gap_se']:.3f}"
        side = "below" if gap["gap"] < 0 else "above"
        yield f"loss {abs(gap['gap']):.3f}{error} nats {side} the teacher's at {gap['length']:,} tokens"
    if _guesses(report):
        yield "worse than guessing"


def _share(report: Mapping[str, Any]) -> tuple[float, str] | None:
    """What the model finds of the needles that the teacher finds, with the words for it; None where it finds none."""
    pairs = [(t, s) for t, s in _needles(report) if _can(t)]
    if not pairs:
        return None
    counts = [sum(entry[name] for entry, _ in pairs) for name in ("correct", "samples")]
    own = [sum(entry[name] for _, entry in pairs) for name in ("correct", "samples")]
    share = (own[0] / own[1]) / (counts[0] / counts[1])
    low, high = share_interval(*own, *counts)
    return share, f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}] of its needles"


def _needles(report: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    yield from zip(report["teacher"]["needles"], report["student"]["needles"], strict=True)


def _can(teacher: Mapping[str, Any]) -> bool:
    return bool(teacher["samples"]) and teacher["accuracy"] >= TEACHER_CAN


def _left_out(report: Mapping[str, Any]) -> Iterator[str]:
    """Settings that say nothing of the conversion, because the teacher fails them."""
    settings = [
        f"{t['kind']} among {t['keys']} at {t['length']:,} ({t['accuracy']:.0%})"
        for t, _ in _needles(report)
        if t["samples"] and not _can(t)
    ]
    if settings:
        more = f" and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
        named = ", ".join(settings[:SHOWN])
        yield f"the teacher itself finds less than {TEACHER_CAN:.0%}, so the verdict leaves out: {named}{more}"
