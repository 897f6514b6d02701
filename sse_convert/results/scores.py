"""What an evaluation measured, as figures that know their conditions, so that only like is set beside like."""

import dataclasses as dc
import math
from collections.abc import Iterator
from pathlib import Path

from sse_convert.evaluation.figures import ModelScores
from sse_convert.evaluation.harness import TaskScore
from sse_convert.evaluation.intervals import Z95, share_interval, wilson
from sse_convert.evaluation.report import EvalReport
from sse_convert.evaluation.retrieval import NeedleScore
from sse_convert.report import counted, format_bytes, format_number
from sse_convert.results.collect import Run

Conditions = tuple[tuple[str, str], ...]
"""names and values of what a figure depends on"""

LOSS = "held-out loss (nats per token)"
GAP = "loss above the teacher's"
BITS = "bits per byte"
NEEDLES = "needles found"
SHARE = "needles, share of the teacher's"
DIVERGENCE = "KL to the teacher (nats per token)"
TOP1 = "same first choice as the teacher"
TASKS = "lm-evaluation-harness"
PREFILL = "prefill (tokens/s)"
DECODE = "decoding (tokens/s)"
CACHE = "cache and state of one sequence"
RATIO = "decoding, as a multiple of the teacher's"
_MACHINE = ("device", "threads", "dtype", "torch")
"""conditions of times"""
FACTS = ("teacher", "layers converted", "kinds of layers", "parameters", "of them new", "recipe", "tokens trained on")
ORDER = (
    *FACTS,
    LOSS,
    GAP,
    BITS,
    DIVERGENCE,
    TOP1,
    NEEDLES,
    SHARE,
    TASKS,
    CACHE,
    PREFILL,
    DECODE,
    RATIO,
)
"""of the quantities in a table"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure of one model."""

    quantity: str
    """what was measured"""
    setting: str
    """at which length, with how many keys ..."""
    order: tuple[str, int, int] = ("", 0, 0)
    """place among the settings: kind, number of keys, length"""
    text: str
    """the figure for a person, with its 95% interval where there is one"""
    value: float | str
    """the figure for a program"""
    low: float | None = None
    """lower end of the 95% interval"""
    high: float | None = None
    """upper end"""
    conditions: Conditions = ()
    """what it can only be compared under"""


def model_measures(evaluation: EvalReport, scores: ModelScores) -> Iterator[Measure]:
    """What was measured on the teacher or the student alone.

    Args:
        evaluation: the report.
        scores: the model's in it.
    """
    text = _text(evaluation)
    for loss in scores.held_out:
        windows = (*text, ("windows", str(loss.windows)))
        yield _interval(LOSS, loss.length, loss.loss, loss.loss_se, (*_tokenizer(evaluation), *windows))
        yield _interval(BITS, loss.length, loss.bits_per_byte, None, windows)
    for needle in scores.needles:
        yield _found(needle, text)
    for task in scores.tasks:
        yield _task(task)
    machine = _conditions(evaluation, *_MACHINE)
    for speed in scores.speed:
        for name, rate in ((PREFILL, speed.prefill_tokens_per_s), (DECODE, speed.decode_tokens_per_s)):
            yield _at_length(name, speed.length, f"{rate:,.0f}", rate, machine)
    for row in evaluation.cache:
        size = row.teacher_bytes if scores is evaluation.teacher else row.student_bytes
        yield _at_length(CACHE, row.length, format_bytes(size), size)


def relative_measures(evaluation: EvalReport) -> Iterator[Measure]:
    """What was measured on the student against its teacher."""
    teacher, student = evaluation.teacher, evaluation.student
    under = conditions(evaluation)
    for gap, loss in zip(evaluation.loss_gaps, student.held_out, strict=True):
        windows = (*under, ("windows", str(loss.windows)))
        yield _interval(GAP, gap.length, gap.gap, gap.gap_se, windows, sign="+")
    for share, t, s in zip(evaluation.retention(), teacher.needles, student.needles, strict=True):
        if share.share is not None:
            low, high = share_interval(s.total.correct, s.total.samples, t.total.correct, t.total.samples)
            yield _share(SHARE, s, (*under, *_samples(s.total.samples)), share.share, low, high)
    for agreement in student.agreement:
        windows = (*under, ("windows", str(agreement.windows)))
        yield _interval(DIVERGENCE, agreement.length, agreement.kl, agreement.kl_se, windows)
        yield _interval(TOP1, agreement.length, agreement.top1, agreement.top1_se, windows)
    machine = (("teacher", teacher_name(evaluation)), *_conditions(evaluation, *_MACHINE))
    for before, after in zip(teacher.speed, student.speed, strict=True):
        ratio = after.decode_tokens_per_s / before.decode_tokens_per_s
        yield _at_length(RATIO, after.length, f"{ratio:.2f}x", ratio, machine)


def teacher_name(evaluation: EvalReport) -> str:
    """Folder name and size of the teacher: the same model under another path stays the same."""
    teacher = evaluation.teacher
    return f"{Path(teacher.name).name} ({format_number(teacher.parameters)})"


def conditions(evaluation: EvalReport) -> Conditions:
    """What figures relative to the teacher depend on, whatever the length."""
    return (*_text(evaluation), *_tokenizer(evaluation))


def run_measures(run: Run) -> Iterator[Measure]:
    """What is known of a run without measuring: layers, sizes, training.

    Args:
        run: a run or a checkpoint.
    """

    def fact(quantity: str, text: str, value: float | str) -> Measure:
        return Measure(quantity=quantity, setting="", text=text, value=value)

    if (model := run.model) is not None:
        converted = sum(name != "full" for name in model.layers)
        if model.base_model:
            yield fact("teacher", Path(model.base_model).name, Path(model.base_model).name)
        yield fact("layers converted", f"{converted} of {len(model.layers)}", converted)
        yield fact("kinds of layers", ", ".join(dict.fromkeys(model.layers)), ", ".join(dict.fromkeys(model.layers)))
        yield fact("parameters", format_number(model.parameters), model.parameters)
        yield fact("of them new", format_number(model.new_parameters), model.new_parameters)
        if model.recipe_hash:
            yield fact("recipe", model.recipe_hash[:12], model.recipe_hash)
    tokens = sum(step.metrics[-1]["tokens"] for step in run.trained if step.metrics)
    if tokens:
        yield fact("tokens trained on", format_number(tokens), tokens)


def cache_measures(run: Run) -> Iterator[Measure]:
    """Bytes by length of a checkpoint that was not evaluated, by formula.

    Args:
        run: a run or a checkpoint.
    """
    for length, size in run.model.cache.items() if run.model else ():
        yield _at_length(CACHE, length, format_bytes(size), size)


def _interval(
    quantity: str, length: int, value: float, error: float | None, under: Conditions, sign: str = ""
) -> Measure:
    """A mean with its standard error; one that is not finite stays visible."""
    if not math.isfinite(value):
        return _at_length(quantity, length, "not finite", "not finite", under)
    if error is None:
        return _at_length(quantity, length, f"{value:{sign}.3f}", value, under)
    spread = Z95 * error
    text = f"{value:{sign}.3f} \N{PLUS-MINUS SIGN} {spread:.3f}"
    return dc.replace(_at_length(quantity, length, text, value, under), low=value - spread, high=value + spread)


def _found(needle: NeedleScore, text: Conditions) -> Measure:
    """What a model finds of the needles of one setting."""
    total, under = needle.total, (*text, *_samples(needle.total.samples))
    if not total.samples:
        return dc.replace(_share(NEEDLES, needle, under, 0.0, 0.0, 0.0), text="no samples", value="no samples")
    return _share(NEEDLES, needle, under, total.value, *wilson(total.correct, total.samples))


def _share(quantity: str, needle: NeedleScore, under: Conditions, share: float, low: float, high: float) -> Measure:
    """A share in one setting of needles, with its interval."""
    return Measure(
        quantity=quantity,
        setting=f"{needle.kind}, {counted(needle.keys, 'key')}, {_tokens(needle.length)}",
        order=(needle.kind, needle.keys, needle.length),
        text=f"{share:.0%} [{100 * low:.0f}, {100 * high:.0f}]",
        value=share,
        low=low,
        high=high,
        conditions=under,
    )


def _task(score: TaskScore) -> Measure:
    spread = "" if score.stderr is None else f" \N{PLUS-MINUS SIGN} {Z95 * score.stderr:.3f}"
    finite = math.isfinite(score.value)
    return Measure(
        quantity=TASKS,
        setting=f"{score.task}, {score.metric}",
        order=(f"{score.task} {score.metric}", 0, 0),
        text=f"{score.value:.3f}{spread}" if finite else "not finite",
        value=score.value if finite else "not finite",
        conditions=_samples(score.samples),
    )


def _at_length(quantity: str, length: int, text: str, value: float | str, under: Conditions = ()) -> Measure:
    """A figure whose only setting is a length."""
    order = ("", 0, length)
    return Measure(quantity=quantity, setting=_tokens(length), order=order, text=text, value=value, conditions=under)


def _tokens(length: int) -> str:
    return f"{length:,} tokens"


def _conditions(evaluation: EvalReport, *keys: str) -> Conditions:
    return tuple((key, str(evaluation.conditions.get(key))) for key in keys)


def _text(evaluation: EvalReport) -> Conditions:
    """Names and content: where files lie counts for nothing, and an export does not say it."""
    told = _conditions(evaluation, "text", "seed", "text_digest")
    names = ((key, ", ".join(part.rpartition("/")[2] for part in value.split(", "))) for key, value in told)
    return tuple((key, value) for key, value in names if value != "None")  # of an earlier version


def _tokenizer(evaluation: EvalReport) -> Conditions:
    """Losses per token are only alike with one tokenizer, which is the teacher's."""
    return (("teacher", teacher_name(evaluation)),)


def _samples(samples: int) -> Conditions:
    return (("samples", str(samples)),)
