"""A hybrid beside its controls: one table from the evaluation reports of all runs, and in words who is ahead.

A figure is ahead of another's when the 95% interval of their difference leaves out zero: Newcombe's interval for
accuracies, a normal one for losses. Losses come as gaps to the same teacher over the same windows. Intervals treat the
two runs as independent, which is careful: both are measured on the same text.
"""

import dataclasses as dc
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sse_convert.evaluation.intervals import Z95, Accuracy, newcombe, or_nan, wilson
from sse_convert.recipe.controls import CONTROLS, MEANING, TO_BEAT
from sse_convert.report import json_ready, table

Verdict = Literal["ahead of", "not ahead of", "behind"]
_COMPARABLE = ("text", "seed", "dtype", "held_out_tokens", "needle_samples")
"""conditions that must be alike"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ControlRun:
    """One control."""

    name: str
    """one of `recipe.controls.CONTROLS`"""
    status: Literal["measured", "not run", "none"]
    """`none`: the recipe has no such control"""
    note: str
    """the folder of a measured control, the command that would run it, or why there is none"""
    report: Mapping[str, Any] | None = None
    """its `EvalReport.to_dict()`"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """One figure of the hybrid beside a control's."""

    control: str
    """name of the control"""
    figure: str
    """what is compared: `loss gap at 512`"""
    ours: str
    """the hybrid's, with its interval"""
    theirs: str
    """the control's"""
    low: float
    """lower end of the 95% interval of the advantage (positive: the hybrid is better)"""
    high: float
    """upper end"""

    @property
    def verdict(self) -> Verdict:
        """Ahead or behind where the interval leaves out zero."""
        return "ahead of" if self.low > 0 else "behind" if self.high < 0 else "not ahead of"

    def line(self) -> str:
        """The judgement in words."""
        return f"{self.verdict} the {self.control} control, {self.figure}: {self.ours} against {self.theirs}"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ControlTable:
    """The hybrid, its teacher and its controls."""

    main: Mapping[str, Any]
    """`EvalReport.to_dict()` of the hybrid"""
    runs: tuple[ControlRun, ...]
    """every control, run or not"""

    def judgements(self) -> list[Judgement]:
        """Every figure of the hybrid beside that of each measured control it should beat."""
        beaten = [run for run in self.runs if run.name in TO_BEAT and self._comparable(run)]
        return [judgement for run in beaten for judgement in judge(run.name, self.main, run.report or {})]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data: dict[str, Any] = json_ready(
            {
                "runs": [
                    {
                        "name": run.name,
                        "meaning": MEANING[run.name],
                        "status": run.status,
                        "note": run.note,
                        "figures": None if run.report is None else _figures(run.report),
                    }
                    for run in self.runs
                ],
                "judgements": [{**dc.asdict(j), "verdict": j.verdict} for j in self.judgements()],
            }
        )
        return data

    def lines(self) -> list[str]:
        """The table, what was not run, and the judgements."""
        ours = _figures(self.main)
        rows: list[tuple[object, ...]] = [
            ("teacher", *_teacher_cells(self.main, ours)),
            ("this model", *ours.values()),
        ]
        notes = []
        for run in self.runs:
            if run.report is None:
                notes.append(f"{run.name} ({MEANING[run.name]}): {run.status}; {run.note}")
            elif not self._comparable(run):
                notes.append(f"{run.name}: measured on other text or samples, or in another precision: not compared")
            else:
                figures = _figures(run.report)
                rows.append((run.name, *(figures.get(name) for name in ours)))
        block = ["beside the controls (95% intervals)", *table(("", *ours), rows)] if ours else []
        return [*block, *notes, *(judgement.line() for judgement in self.judgements()), *self._to_tuned()]

    def _comparable(self, run: ControlRun) -> bool:
        return run.report is not None and comparable(self.main, run.report)

    def _to_tuned(self) -> list[str]:
        """The gap to the teacher that went through the same training."""
        lines = []
        for run in self.runs:
            if run.name == CONTROLS[0] and run.report is not None and self._comparable(run):
                theirs = {gap["length"]: gap for gap in run.report["loss_gaps"]}
                for gap in self.main["loss_gaps"]:
                    if (other := theirs.get(gap["length"])) is not None:
                        error = _difference_error(gap, other)
                        value = _nats(or_nan(gap["gap"]) - or_nan(other["gap"]), error)
                        lines.append(f"loss gap to {run.name} at {gap['length']:,}: {value}")
        return lines


def _accuracies(report: Mapping[str, Any], model: str) -> dict[str, Accuracy]:
    """Accuracies by figure: needles pooled by length."""
    pooled: dict[str, list[float]] = {}
    for entry in report[model].get("needles", []):
        hits = pooled.setdefault(f"needles at {entry['length']:,}", [0, 0])
        hits[0] += entry["correct"]
        hits[1] += entry["samples"]
    return {name: Accuracy(correct, int(samples)) for name, (correct, samples) in pooled.items()}


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    """Every compared figure of a report's student, as text."""
    gaps = {f"loss gap at {gap['length']:,}": _nats(gap["gap"], gap["gap_se"]) for gap in report["loss_gaps"]}
    return gaps | {name: _share(accuracy) for name, accuracy in _accuracies(report, "student").items()}


def _teacher_cells(report: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    accuracies = _accuracies(report, "teacher")
    return [_share(accuracies[name]) if name in accuracies else "0" for name in names]


def comparable(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two reports are of the same text and samples, in the same precision."""
    return all(theirs["conditions"].get(key) == ours["conditions"].get(key) for key in _COMPARABLE)


def judge(control: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Judgement]:
    """Every figure of one report beside that of another, where both have it.

    Args:
        control: name of the other model.
        ours: `EvalReport.to_dict()`.
        theirs: the same of the other model, measured alike.
    """
    known = {gap["length"]: gap for gap in theirs["loss_gaps"]}
    for gap in ours["loss_gaps"]:
        if (other := known.get(gap["length"])) is None:
            continue
        advantage = or_nan(other["gap"]) - or_nan(gap["gap"])
        error = _difference_error(gap, other)
        half = math.inf if error is None else Z95 * error
        texts = (_nats(gap["gap"], gap["gap_se"]), _nats(other["gap"], other["gap_se"]))
        yield _judgement(control, f"loss gap at {gap['length']:,}", *texts, advantage - half, advantage + half)
    shares = _accuracies(theirs, "student")
    for name, accuracy in _accuracies(ours, "student").items():
        if name in shares:
            texts = (_share(accuracy), _share(shares[name]))
            yield _judgement(control, name, *texts, *newcombe(accuracy, shares[name]))


def _judgement(control: str, figure: str, ours: str, theirs: str, low: float, high: float) -> Judgement:
    return Judgement(control=control, figure=figure, ours=ours, theirs=theirs, low=low, high=high)


def _difference_error(a: Mapping[str, Any], b: Mapping[str, Any]) -> float | None:
    if a["gap_se"] is None or b["gap_se"] is None:
        return None
    return math.hypot(a["gap_se"], b["gap_se"])


def _nats(value: float | None, error: float | None) -> str:
    text = f"{or_nan(value):.3f}"
    return text if error is None else f"{text} ± {Z95 * error:.3f}"


def _share(accuracy: Accuracy) -> str:
    low, high = wilson(accuracy.correct, accuracy.samples)
    return f"{accuracy.value:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
