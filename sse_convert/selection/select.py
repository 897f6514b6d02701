"""Choose which layers stay softmax attention: one model in memory, every measurement on disk as soon as it is made."""

import contextlib
import dataclasses as dc
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.run_lock import run_lock
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.console import progress, say
from sse_convert.mixers import FULL, mixer_to_dict
from sse_convert.recipe.choosing import METHODS, chosen_recipe, most_sets, open_choice
from sse_convert.recipe.pattern import pattern_unit
from sse_convert.recipe.schema import Recipe
from sse_convert.report import found_before
from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Measurement, Meter
from sse_convert.selection.recall_probes import NAMES
from sse_convert.selection.selection_report import SelectReport
from sse_convert.selection.setup import SelectSettings, check_recall, run_method, set_up
from sse_convert.selection.team import ALONE, Team
from sse_convert.surgery.budget import layer_bytes, table_lengths
from sse_convert.surgery.guessing import guess_warnings
from sse_convert.surgery.job import Job

ANSWERED = 0.5
"""a teacher that answers this share of a form is judged by it"""
SIGNAL = 0.5
"""else by the form where its loss is the smallest share of the loss with every layer replaced, this share at most"""


def select_layers(
    job: Job,
    out: Path,
    settings: SelectSettings,
    *,
    text: Path | None = None,
    device: str | None = None,
    team: Team = ALONE,
    try_teacher: bool = False,
) -> SelectReport:
    """Choose layers; an interrupted run of the same inputs is continued.

    The model runs in float32 on a CPU and in its stored type elsewhere; see `SelectSettings.light`.
    Other arguments and errors as of `api.select`.

    Args:
        job: model, and recipe as a selection reads it (`from_recipe.settings_for`).
        settings: method and sizes.
        team: processes that share the work; every one must call it. The first writes and says what was found.
        try_teacher: warn of one that guesses, before any layer is chosen.
    """
    with progress("reading text to choose by", 1):
        setup = set_up(job, out, settings, text=text, device=device, team=team)
    meter = setup.meter
    with contextlib.ExitStack() as held:
        if team.leads:
            held.enter_context(run_lock(out))
        with meter.shown("looking for what the teacher recalls", 2 * len(meter.probe.recall)):
            recall, nothing = settle_recall(meter)
        if try_teacher and team.leads:
            for warning in guess_warnings(meter.measure(meter.layers).text_loss, job.teacher().text.vocab_size):
                say(f"warning: {warning}")
        method = settings.method
        if method != METHODS["layers"] and meter.span == 1 and not meter.recall_weight:
            method = METHODS["layers"]  # nothing ranks them
        check_recall(meter.span, meter.recall_weight)
        most = most_sets(method, keep=settings.keep, among=len(meter.layers), tries=settings.tries)
        with meter.shown(f"choosing {'heads' if meter.span > 1 else 'layers'}", most):
            meter.measure_all([meter.layers, ()], beside=())
            choice = run_method(method, meter, settings.keep, settings.tries)
        report = SelectReport(
            model=job.recipe.model,
            folder=out,
            keep=settings.keep,
            layers=_layers(job.recipe, choice, job.teacher()),
            span=meter.span,
            stand_in=mixer_to_dict(setup.stand_in),
            recall=recall,
            teacher=meter.measure(meter.layers),
            nothing=nothing,
            chosen=choice,
            cache_length=_context(job.teacher()),
            cache_bytes_saved=_saved(job, meter),
            conditions={**dc.asdict(settings), **setup.conditions},
        )
        if team.leads:
            with found_before(report):
                report.write()
    return report


def settle_recall(meter: Meter) -> tuple[str, Measurement]:
    """Find recall rows that this teacher answers, or at least answers better than without any far attention; text alone
    where there are none.

    Returns:
        What was settled on and why, and the model with every layer replaced.
    """
    tried: dict[str, Measurement] = {}
    for kind in meter.probe.recall:
        meter.recall = kind
        tried[kind] = meter.measure(meter.layers)
        if tried[kind].recall_accuracy >= ANSWERED:
            break
    answered = [f"the teacher answers {found.recall_accuracy:.0%} of {NAMES[kind]}" for kind, found in tried.items()]
    if tried[meter.recall].recall_accuracy >= ANSWERED:
        return f"{NAMES[meter.recall]}: " + ", ".join(answered), meter.measure(())
    lost = {kind: found.recall_loss / _without_all(meter, kind).recall_loss for kind, found in tried.items()}
    meter.recall = min(lost, key=lambda kind: lost[kind])
    nothing = meter.measure(())
    losses = f"{tried[meter.recall].recall_loss:.2f} nats per token, {nothing.recall_loss:.2f} without any layer"
    if lost[meter.recall] <= SIGNAL:
        return f"{NAMES[meter.recall]}, answered at {losses} ({', '.join(answered)})", nothing
    meter.recall_weight = 0.0
    return f"none: {', '.join(answered)}; {NAMES[meter.recall]} at {losses}. Text alone decides", nothing


def _without_all(meter: Meter, kind: str) -> Measurement:
    meter.recall = kind
    return meter.measure(())


def _context(teacher: Teacher) -> int:
    """Tokens of a sequence that the model can read."""
    return table_lengths(context_limit(teacher.config))[0]


def _saved(job: Job, meter: Meter) -> list[int]:
    """Cache bytes that each layer, or head, saves as the mixer that the recipe gives it."""
    teacher, sizes, span = job.teacher(), job.geometry(), meter.span
    mixer, context = job.recipe.known_mixers[replacement(job.recipe)], _context(teacher)

    def saved(layer: int) -> int:
        whole = layer_bytes(sizes, layer, None, context) - layer_bytes(sizes, layer, mixer, context)
        return whole if span == 1 else whole // teacher.dims_of(layer).kv_heads

    return [saved(unit // span) if unit in meter.layers else 0 for unit in range(teacher.num_layers * span)]


def _layers(recipe: Recipe, choice: Choice, teacher: Teacher) -> dict[str, Any]:
    """`layers` of the recipe with a choice: as it notes one, or the replacement's name and the kept layers."""
    if recipe.layers.select is None:
        return {"pattern": [replacement(recipe)], "keep": list(choice.kept)}
    found = open_choice(recipe, teacher.num_layers, teacher.separable_heads)
    plain = dc.asdict(chosen_recipe(recipe, choice.kept, found).layers)
    if plain["select"]["by"] == "layers":
        del plain["select"]["by"]
    return {key: value for key, value in plain.items() if value}


def replacement(recipe: Recipe) -> str:
    """The first mixer of the recipe's pattern: what layers that are not kept become."""
    return next((name for name in pattern_unit(recipe.layers) if name != FULL), "sse+sliding")
