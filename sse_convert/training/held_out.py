"""Looks at held-out text while a stage trains: loss and KL to the teacher, on the same rows each time.

What is trained is the same with and without them, to the last bit: models are in evaluation mode meanwhile, and random
states and what routers remember are put back. A look has the model that trains and the teacher that is there for it, no
copy of either, on the processes that train, with rows dealt out as those of a step are.
"""

import contextlib
import dataclasses as dc
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from sse_convert.console import say
from sse_convert.data.packing import IGNORED
from sse_convert.data.rows import Row, RowReader
from sse_convert.errors import DataError, HubError
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.training.context import Place
from sse_convert.training.monitors import Monitor
from sse_convert.training.objective import Objective
from sse_convert.training.prefetch import micro_batches
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_job import StageJob

LOOKS = 20
"""in a stage, about, and fewer in a short one; `train.validate_every` says otherwise"""
SHARE = 0.02
"""of a stage's tokens, those that all its looks read: forward passes alone, so less of its time"""
MOST_ROWS = 64
PATIENCE = 3
"""looks that are worse than the lowest and than the one before, one after the other, before that is said"""
SETTLED = 0.25
"""part of a stage after which that counts: one that starts close to its teacher gets worse before it gets better"""
WORSE = 0.01
"""part of the lowest figure by which a look has to be above it to be worse"""
NAMES = {"valid_loss": "held-out loss", "valid_kl": "held-out KL"}
"""keys of a step's record, in words"""


@dc.dataclass(frozen=True, slots=True)
class Looks:
    """When a stage looks at held-out text, and at how much of it. Processes decide nothing here."""

    every: int
    """optimizer steps; the first and the last one have a look as well"""
    rows: int
    """rows of the stage's length, at most"""
    settled: int
    """step after which getting worse counts"""

    @staticmethod
    def of(recipe: Recipe, stage: Stage) -> "Looks | None":
        """Those of a stage; None for none."""
        wanted = recipe.train.validate_every
        if wanted is None or not recipe.data.valid:
            return None
        schedule = Schedule.of(stage)
        most = max(1, min(LOOKS, int(SHARE * schedule.steps * schedule.rows)))  # a look has one row or more
        every = -(-schedule.steps // most) if wanted == "auto" else max(1, round(wanted / schedule.step_tokens))
        tokens = SHARE * schedule.steps * schedule.step_tokens / (schedule.steps // every + 2)
        rows = max(1, min(MOST_ROWS, int(tokens // stage.seq_len)))
        return Looks(every, rows, int(SETTLED * schedule.steps))

    def due(self, step: int, *, last: bool) -> bool:
        """Whether there is one after this step (from 1)."""
        return last or step == 1 or step % self.every == 0


def held_out_rows(ready: StageJob, looks: Looks) -> list[Row]:
    """The rows of a stage's looks: the first of `data.valid`, as evaluation reads it, that predict something. None on
    every process where one of them has none, since they look together; every process must call it.

    Raises:
        DataError, HubError: they cannot be read, and the recipe asks for looks itself.
    """
    rows, why = _readable_rows(ready, looks)
    problems = [text for text in gather_object([why]) if text]
    if problems and ready.leads:
        say(f"{ready.stage.name}: no looks at held-out text: {problems[0]}")
    return [] if problems else rows


def _readable_rows(ready: StageJob, looks: Looks) -> tuple[list[Row], str]:
    """The rows, and why there are none."""
    recipe, stage = ready.job.recipe, ready.stage
    try:
        reader = RowReader(
            recipe.data.valid,
            ready.tokenizer,
            stage.seq_len,
            recipe.data.seed,
            role="valid",
            loss_mask=stage.loss_mask,
            teacher=ready.job.sampler,
        )
        reader.prepare()
        rows = [row for row in islice(reader.rows(), looks.rows) if (row.labels[1:] != IGNORED).any()]
        if not rows:
            raise DataError(
                "the held-out text has no token to predict",
                expected="assistant turns in data.valid, where loss_mask is assistant",
                fix="add a source that has some, or set train.validate_every: null",
            )
    except (DataError, HubError) as error:
        if recipe.train.validate_every != "auto":
            raise
        return [], error.what
    return rows, ""


class HeldOut(Monitor):
    """The looks of a stage, and which was the lowest. JSON-ready memory lets a continued stage go on from them.

    Args:
        objective: what is trained.
        ready: the stage.
        looks: when.
        rows: from `held_out_rows`, one or more.
        micro_batch: most rows of a forward pass.
        memory: of an interrupted run; of other rows it counts for nothing.
    """

    key = "held_out"

    def __init__(
        self,
        objective: Objective,
        ready: StageJob,
        looks: Looks,
        rows: Sequence[Row],
        micro_batch: int,
        memory: dict[str, Any] | None,
    ) -> None:
        self._objective, self._looks, self._name, place = objective, looks, ready.stage.name, ready.place
        evenly = len(rows) % place.ranks == 0
        self._batches = micro_batches(_dealt_out(rows, place), micro_batch if evenly else 1, place)
        digest = hashlib.sha256(b"".join(row.input_ids.tobytes() + row.labels.tobytes() for row in rows)).hexdigest()
        fresh: dict[str, Any] = {"rows": digest, "first": None, "last": None, "lowest": None, "worse": 0}
        self._memory = memory if memory is not None and memory["rows"] == digest else fresh

    def after_update(self, step: int, *, last: bool) -> dict[str, float]:
        """The figures after a step (from 1), for its record; empty where no look is due. Every process must call it."""
        if not self._looks.due(step, last=last):
            return {}
        began = time.monotonic()
        found = self._objective.held_out_means(self._sums())
        if math.isfinite(value := found[self._objective.judged]):
            self._remember(step, value)
        return {**found, "valid_seconds": time.monotonic() - began}

    def note(self) -> str:
        """The last figure, for the progress bar."""
        last = self._memory["last"]
        return "" if last is None else f", {NAMES[self._objective.judged]} {last['value']:.4f}"

    def memory(self) -> dict[str, Any]:
        """The first, the last and the lowest look, and of which rows."""
        return self._memory

    def report(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """`held_out`: first, last and best look, and what they judge by."""
        first, last, best = (self._memory[key] for key in ("first", "last", "lowest"))
        return {"held_out": {"judged": self._objective.judged, "first": first, "last": last, "best": best}}

    def _sums(self) -> dict[str, float]:
        accelerator = self._objective.accelerator
        sums: dict[str, Tensor] = {}
        with _undisturbed(self._objective), torch.no_grad():
            for batch in self._batches:
                for name, value in self._objective.held_out(self._objective.on_device(batch)).items():
                    sums[name] = sums.get(name, 0) + value.double()
        total = accelerator.reduce(torch.stack(list(sums.values())), "sum")
        return dict(zip(sums, total.tolist(), strict=True))

    def _remember(self, step: int, value: float) -> None:
        point, lowest, before = {"step": step, "value": value}, self._memory["lowest"], self._memory["last"]
        self._memory = {**self._memory, "first": self._memory["first"] or point, "last": point}
        if lowest is None or value < lowest["value"]:
            self._memory |= {"lowest": point, "worse": 0}
            return
        rises = is_worse(value, lowest["value"]) and value > before["value"] and step > self._looks.settled
        self._memory["worse"] = worse = self._memory["worse"] + 1 if rises else 0
        if worse == PATIENCE and self._objective.accelerator.is_main_process:
            say(
                f"warning: {self._name}: {NAMES[self._objective.judged]} was {lowest['value']:.4f} at step "
                f"{lowest['step']:,} and is {value:.4f} at step {step:,}, worse in {PATIENCE} looks one after the "
                "other; lower tokens or lr, or add text"
            )


def is_worse(value: float, lowest: float) -> bool:
    """Whether a figure is above the lowest by more than it moves from look to look."""
    return value > lowest * (1 + WORSE)


def _dealt_out(rows: Sequence[Row], place: Place) -> list[Row]:
    """This process's rows. All have as many, since they make their passes together: one more predicts nothing."""
    size = -(-len(rows) // place.ranks)
    empty = dc.replace(rows[0], labels=np.full_like(rows[0].labels, IGNORED))
    return [*rows[place.rank :: place.ranks], empty][:size]


@contextlib.contextmanager
def _undisturbed(objective: Objective) -> Iterator[None]:
    """Evaluation mode without compilation; afterwards everything that training goes on from is what it was."""
    traces = [vars(layer.trace) for layer in _layers(objective)]
    kept = [dict(trace) for trace in traces]
    device = objective.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for part in objective.parts:
            part.module.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for part in objective.parts:
                part.module.train()
            for trace, before in zip(traces, kept, strict=True):
                trace.update(before)


def _layers(objective: Objective) -> list[Any]:
    student: Any = objective.student
    return list(student.sse_layers().values())
