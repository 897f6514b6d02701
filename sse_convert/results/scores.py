"""What an evaluation measured, as figures that know their conditions, so that only like is set beside like."""

import dataclasses as dc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sse_convert.evaluation.intervals import Z95, share_interval
from sse_convert.report import format_bytes, format_number
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


def model_measures(evaluation: Mapping[str, Any], which: Literal["teacher", "student"]) -> Iterator[Measure]:
    """What was measured on the teacher or the student alone.

    Args:
        evaluation: the report.
        which: the model.
    """
    scores = evaluation[which]
    text = _text(evaluation)
    for entry in scores["held_out"]:
        windows = (*text, ("windows", str(entry["windows"])))
        yield _interval(LOSS, entry["length"], entry["loss"], entry["loss_se"], (*_tokenizer(evaluation), *windows))
        yield _interval(BITS, entry["length"], entry["bits_per_byte"], None, windows)
    for entry in scores["needles"]:
        yield _share(NEEDLES, _needle_setting(entry), _needle_order(entry), entry, (*text, *_samples(entry)))
    for entry in scores.get("tasks", []):
        yield _task(entry)
    machine = _conditions(evaluation, "device", "threads", "dtype", "torch")
    for entry in scores["speed"]:
        for name, key in ((PREFILL, "prefill_tokens_per_s"), (DECODE, "decode_tokens_per_s")):
            yield _at_length(name, entry["length"], f"{entry[key]:,.0f}", entry[key], machine)
    for row in evaluation["cache"]:
        size = row[f"{which}_bytes"]
        yield _at_length(CACHE, row["length"], format_bytes(size), size)


def relative_measures(evaluation: Mapping[str, Any]) -> Iterator[Measure]:
    """What was measured on the student against its teacher.

    Args:
        evaluation: the report.
    """
    data = evaluation
    under = conditions(evaluation)
    for row, entry in zip(data["loss_gaps"], data["student"]["held_out"], strict=True):
        windows = (*under, ("windows", str(entry["windows"])))
        yield _interval(GAP, row["length"], row["gap"], row["gap_se"], windows, sign="+")
    for row, t, s in zip(data["retention"], data["teacher"]["needles"], data["student"]["needles"], strict=True):
        if row["share"] is not None:
            low, high = share_interval(s["correct"], s["samples"], t["correct"], t["samples"])
            yield Measure(
                quantity=SHARE,
                setting=_needle_setting(row),
                order=_needle_order(row),
                text=f"{row['share']:.0%} [{100 * low:.0f}, {100 * high:.0f}]",
                value=row["share"],
                low=low,
                high=high,
                conditions=(*under, *_samples(s)),
            )
    for entry in data["student"].get("agreement", []):
        windows = (*under, ("windows", str(entry["windows"])))
        yield _interval(DIVERGENCE, entry["length"], entry["kl"], entry["kl_se"], windows)
        yield _interval(TOP1, entry["length"], entry["top1"], entry["top1_se"], windows)
    machine = (("teacher", teacher_name(evaluation)), *_conditions(evaluation, "device", "threads", "dtype", "torch"))
    for t, s in zip(data["teacher"]["speed"], data["student"]["speed"], strict=True):
        ratio = s["decode_tokens_per_s"] / t["decode_tokens_per_s"]
        yield _at_length(RATIO, s["length"], f"{ratio:.2f}x", ratio, machine)


def teacher_name(evaluation: Mapping[str, Any]) -> str:
    """Folder name and size of the teacher: the same model under another path stays the same."""
    teacher = evaluation["teacher"]
    return f"{Path(teacher['name']).name} ({format_number(teacher['parameters'])})"


def conditions(evaluation: Mapping[str, Any]) -> Conditions:
    """What figures relative to the teacher depend on, whatever the length.

    Args:
        evaluation: the report.
    """
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
    quantity: str, length: int, value: float | None, error: float | None, under: Conditions, sign: str = ""
) -> Measure:
    """A mean with its standard error; NaN, stored as null, stays visible."""
    spread = None if value is None or error is None else Z95 * error
    text = "not finite" if value is None else f"{value:{sign}.3f}"
    text = text if spread is None else f"{text} \N{PLUS-MINUS SIGN} {spread:.3f}"
    measure = _at_length(quantity, length, text, "not finite" if value is None else value, under)
    if value is None or spread is None:
        return measure
    return dc.replace(measure, low=value - spread, high=value + spread)


def _share(
    quantity: str, setting: str, order: tuple[str, int, int], entry: Mapping[str, Any], under: Conditions
) -> Measure:
    """A share of hits with the interval that the report gives."""
    share, low, high = (entry[key] for key in ("accuracy", "low", "high"))
    return Measure(
        quantity=quantity,
        setting=setting,
        order=order,
        text="no samples" if share is None else f"{share:.0%} [{100 * low:.0f}, {100 * high:.0f}]",
        value="no samples" if share is None else share,
        low=low,
        high=high,
        conditions=under,
    )


def _task(entry: Mapping[str, Any]) -> Measure:
    spread = "" if entry["stderr"] is None else f" \N{PLUS-MINUS SIGN} {Z95 * entry['stderr']:.3f}"
    return Measure(
        quantity=TASKS,
        setting=f"{entry['task']}, {entry['metric']}",
        order=(f"{entry['task']} {entry['metric']}", 0, 0),
        text="not finite" if entry["value"] is None else f"{entry['value']:.3f}{spread}",
        value="not finite" if entry["value"] is None else entry["value"],
        conditions=_samples(entry),
    )


def _needle_setting(entry: Mapping[str, Any]) -> str:
    keys = f"{entry['keys']} key{'s' if entry['keys'] > 1 else ''}"
    return f"{entry['kind']}, {keys}, {_tokens(entry['length'])}"


def _needle_order(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    return entry["kind"], entry["keys"], entry["length"]


def _at_length(quantity: str, length: int, text: str, value: float | str, under: Conditions = ()) -> Measure:
    """A figure whose only setting is a length."""
    order = ("", 0, length)
    return Measure(quantity=quantity, setting=_tokens(length), order=order, text=text, value=value, conditions=under)


def _tokens(length: int) -> str:
    return f"{length:,} tokens"


def _conditions(evaluation: Mapping[str, Any], *keys: str) -> Conditions:
    return tuple((key, str(evaluation["conditions"].get(key))) for key in keys)


def _text(evaluation: Mapping[str, Any]) -> Conditions:
    """Names and content: where files lie counts for nothing, and an export does not say it."""
    told = _conditions(evaluation, "text", "seed", "text_digest")
    names = ((key, ", ".join(part.rpartition("/")[2] for part in value.split(", "))) for key, value in told)
    return tuple((key, value) for key, value in names if value != "None")  # of an earlier version


def _tokenizer(evaluation: Mapping[str, Any]) -> Conditions:
    """Losses per token are only alike with one tokenizer, which is the teacher's."""
    return (("teacher", teacher_name(evaluation)),)


def _samples(entry: Mapping[str, Any]) -> Conditions:
    return (("samples", str(entry["samples"])),)
