"""What a selection needs before its first measurement: settings that fit the model, rows, a folder, a meter."""

import dataclasses as dc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sse_convert.checkpoints.identity import data_digest, read_sealed, write_sealed
from sse_convert.checkpoints.load_model import context_limit, device_name, load_model, pick_device
from sse_convert.checkpoints.run_lock import LOCK
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.errors import CheckpointError, DataError, OutputError, UsageError
from sse_convert.mixers import Mixer, SlidingMixer, mixer_to_dict
from sse_convert.recipe.choosing import TRIES
from sse_convert.recipe.schema import Recipe, Source
from sse_convert.selection.choice import Choice
from sse_convert.selection.greedy import greedy
from sse_convert.selection.layer_swap import Swap
from sse_convert.selection.measure import Meter
from sse_convert.selection.probe import Probe, make_probe
from sse_convert.selection.retrieval import retrieval
from sse_convert.selection.team import ALONE, Team
from sse_convert.surgery.cpu_speed import fast_in_bfloat16
from sse_convert.surgery.job import Job
from sse_convert.training.stage_record import refuse_changes

STAND_IN = "sliding"
"""name of the mixer that replaces layers while choosing, untrained"""
METHODS: dict[str, Callable[[Meter, int, int], Choice]] = {"greedy": greedy, "retrieval": retrieval}
WINDOWS = 4
"""that a row must hold at least, so that there is something they do not see"""
SHORTEST_ROW = 64
"""tokens of a row at least"""
INPUTS = "inputs.json"
MEASUREMENTS = "measurements.csv"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SelectSettings:
    """How layers are chosen."""

    keep: int
    """layers to keep"""
    among: tuple[int, ...] | None = None
    """layers to choose from, ascending; None for all"""
    units: tuple[int, ...] | None = None
    """what is chosen from: these layers, or numbers of their heads (`recipe.pattern.OpenChoice`); None for layers"""
    span: int = 1
    """of those numbers"""
    method: str = "greedy"
    """of `METHODS`"""
    tries: int = TRIES
    """units that each may take the place of a kept one, of the method retrieval"""
    light: bool = False
    """measure less on a CPU (`surgery.choice_cost`), in the model's stored type where the CPU is fast in bfloat16"""
    tokens: int = 8192
    """running text to predict"""
    length: int = 1024
    """tokens per row"""
    samples: int = 16
    """recall rows"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A selection about to begin."""

    meter: Meter
    stand_in: SlidingMixer
    conditions: dict[str, Any]
    """device, dtype and text, for reports"""


def set_up(
    job: Job,
    out: Path,
    settings: SelectSettings,
    *,
    text: Path | None,
    device: str | None,
    team: Team = ALONE,
) -> Setup:
    """Check everything, make the rows and open the folder. The model is loaded when something has to be measured.

    Args, Raises: see `select.select_layers`.
    """
    recipe, teacher, place = job.recipe, job.teacher(), pick_device(device)
    among = tuple(range(teacher.num_layers)) if settings.among is None else settings.among
    _check(settings, teacher, among)
    stand_in = recipe.known_mixers[STAND_IN]
    assert isinstance(stand_in, SlidingMixer)
    sources = _sources(recipe, text)
    probe = make_probe(
        job,
        sources,
        tokens=settings.tokens,
        length=settings.length,
        samples=settings.samples,
    )
    stored = place.type != "cpu" or (settings.light and fast_in_bfloat16())
    dtype = (teacher.config.dtype if stored else None) or torch.float32
    inputs = _inputs(job, stand_in, probe, place, dtype, settings.span)
    if team.leads:
        _open_folder(out, inputs)

    def load() -> Swap:
        model = load_model(job.files(), device=str(place), dtype=dtype)
        return Swap(model, stand_in, among, settings.span)

    units = among if settings.units is None else settings.units
    return Setup(
        meter=Meter(load, probe, units, out / MEASUREMENTS, team, settings.span),
        stand_in=stand_in,
        conditions={
            "device": device_name(place),
            "threads": torch.get_num_threads() if place.type == "cpu" else None,
            "cores": os.cpu_count(),
            "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "context": context_limit(teacher.config),
            "text": ", ".join(source.path or "samples of the teacher" for source in sources),
        },
    )


def run_method(method: str, meter: Meter, keep: int, tries: int) -> Choice:
    """One method's choice, with what it cost and what it is worth."""
    with meter.costing() as cost:
        choice = METHODS[method](meter, keep, tries)
    return dc.replace(
        choice, span=meter.span, tokens=cost.tokens, seconds=round(cost.seconds, 1), measured=meter.measure(choice.kept)
    )


def check_recall(span: int, recall_weight: float) -> None:
    """Make sure that there is recall where heads are ranked by it.

    Raises:
        UsageError: heads are to be chosen, and the teacher recalls nothing.
    """
    if span > 1 and recall_weight == 0:
        raise UsageError(
            "heads are ranked by recall, and the teacher recalls nothing: text alone decides",
            expected="a teacher that recalls something",
            fix="choose layers instead, with select: {by: layers} in the recipe",
        )


def _check(settings: SelectSettings, teacher: Teacher, among: tuple[int, ...]) -> None:
    """Look at everything that can be found wrong without text."""
    layers, limit = teacher.num_layers, context_limit(teacher.config)
    if not set(among) <= set(teacher.softmax_layers):
        raise CheckpointError(
            f"{teacher.files.name} has softmax attention in {len(teacher.softmax_layers)} of {layers} layers",
            expected="softmax attention in every layer to choose from: select swaps each of them",
            fix=f"give a recipe with layers.select whose pattern converts layers {teacher.softmax_layers} alone",
        )
    units, what = settings.units or among, "layers" if settings.span == 1 else "heads"
    if not 1 <= settings.keep < len(units):
        raise UsageError(
            f"keep is {settings.keep}",
            expected=f"1 to {len(units) - 1}: there are {len(units)} {what} to choose from",
            fix="change --keep",
        )
    if not SHORTEST_ROW <= settings.length <= (limit or settings.length):
        bound = "" if limit is None else f", and at most the context of {limit}"
        raise UsageError(
            f"length is {settings.length}",
            expected=f"{SHORTEST_ROW} or more{bound}",
            fix=f"give --length {max(SHORTEST_ROW, min(settings.length, limit or settings.length))}",
        )
    if settings.samples < 1:
        raise UsageError(f"samples is {settings.samples}", expected="at least 1")
    if settings.tokens < settings.length:
        raise UsageError(f"tokens is {settings.tokens}", expected=f"at least one row ({settings.length})")


def _sources(recipe: Recipe, text: Path | None) -> list[Source]:
    if text is None:
        if not recipe.data.valid:
            raise DataError(
                "there is no text to choose layers by",
                expected="data.train in the recipe",
                fix="add a source, give `select --text`, or name the layers in layers.select.chosen",
            )
        return recipe.data.valid
    if not text.exists():
        raise DataError(
            f"{text} does not exist", expected="a UTF-8 text file or a folder of them", fix="correct --text"
        )
    return [Source(path=str(text))]


def _inputs(
    job: Job, stand_in: Mixer, probe: Probe, place: torch.device, dtype: torch.dtype, span: int
) -> dict[str, Any]:
    """All that a measurement depends on; the method and its settings are not among it."""
    return {
        "model": job.identity,
        "stand_in": mixer_to_dict(stand_in),
        **({} if span == 1 else {"heads": span}),
        "probe": data_digest(probe.fingerprint()),
        "device": place.type,
        "dtype": str(dtype),
    }


def _open_folder(out: Path, inputs: dict[str, Any]) -> None:
    """A new folder with a note of its inputs, or an earlier one with the same."""
    file = out / INPUTS
    before = read_sealed(file)
    if before is not None:
        refuse_changes(out, before, inputs)
        return
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise OutputError(
            f"{out} exists" + (f", and its {INPUTS} is damaged" if file.is_file() else ""),
            expected="a new folder, or that of an earlier selection",
            fix="choose another folder",
        )
    write_sealed(file, inputs)
