"""Tables of an evaluation report, one function per kind of figure, and how figures with intervals are written."""

from collections.abc import Sequence

from sse_convert.evaluation.agreement import Agreement, PositionAgreement
from sse_convert.evaluation.harness import TaskScore
from sse_convert.evaluation.intervals import Z95, Accuracy, wilson
from sse_convert.report import table


def agreement_lines(scores: Sequence[Agreement]) -> list[str]:
    """KL and top-1 agreement by position, over all positions of a window first."""
    rows = [
        (
            score.length,
            f"{part.start}-{part.stop - 1}" if isinstance(part, PositionAgreement) else "all",
            part.tokens,
            part.kl,
            spread(part.kl_se),
            f"{part.top1:.2%}",
            None if part.top1_se is None else f"{Z95 * part.top1_se:.2%}",
        )
        for score in scores
        for part in _parts(score)
    ]
    header = ("length", "context", "tokens", "KL(teacher || student)", "+-95%", "same first choice", "+-95%")
    return ["predictions beside the teacher's (nats/token, share)", *table(header, rows)] if rows else []


def _parts(score: Agreement) -> tuple[Agreement | PositionAgreement, ...]:
    return (score, *score.buckets)


def task_lines(teacher: Sequence[TaskScore], student: Sequence[TaskScore]) -> list[str]:
    """Tasks of the lm-evaluation-harness."""
    known = {(score.task, score.metric): score for score in teacher}
    rows = [
        (s.task, s.metric, _arrow(s), s.samples, *_value(known.get((s.task, s.metric))), *_value(s)) for s in student
    ]
    header = ("task", "metric", "better", "samples", "teacher", "+-stderr", "student", "+-stderr")
    return ["lm-evaluation-harness (standard errors)", *table(header, rows)] if rows else []


def spread(error: float | None) -> float | None:
    """Half a 95% interval from a standard error."""
    return None if error is None else Z95 * error


def percent(share: float | None) -> str | None:
    """A share with one decimal."""
    return None if share is None else f"{share:.1%}"


def interval(accuracy: Accuracy) -> str:
    """A share with its Wilson interval."""
    low, high = wilson(accuracy.correct, accuracy.samples)
    return f"{accuracy.value:.1%} ({100 * low:.0f}-{100 * high:.0f})"


def _arrow(score: TaskScore) -> str | None:
    return None if score.higher_is_better is None else "higher" if score.higher_is_better else "lower"


def _value(score: TaskScore | None) -> tuple[float | None, float | None]:
    return (None, None) if score is None else (score.value, score.stderr)
