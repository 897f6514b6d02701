"""The rows of each optimizer step, dealt out to processes and micro batches, made ready in the background."""

import contextlib
import dataclasses as dc
import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.data.packing import IGNORED
from sse_convert.data.rows import Row, stack
from sse_convert.training.context import Place

AHEAD = 2
"""steps prepared in advance"""
_POLL_SECONDS = 0.2


@dc.dataclass(frozen=True, slots=True)
class Step:
    """One process's share of an optimizer step."""

    batches: list[dict[str, Tensor]]
    """micro batches: `input_ids`, `position_ids`, `targets`, each int64 [R, T], and what the loss wants beside
    them, such as `answers`; where rows are split, this process's tokens of them, and `context.ROW_POSITIONS`"""
    position: dict[str, Any]
    """where the next step's rows start"""


def steps(
    rows: Iterator[Row],
    *,
    rows_per_step: int,
    micro_batch: int,
    place: Place,
) -> Iterator[Step]:
    """Cut a stream of rows into steps, those into rows and parts of rows for each process.

    Args:
        rows: from `RowReader.rows`; every process reads them all.
        rows_per_step: rows of all processes together, a multiple of `place.ranks`.
        micro_batch: most rows of one forward pass.
        place: of this process; rank r takes every row from r on in steps of the number of ranks.
    """
    while len(whole := list(islice(rows, rows_per_step))) == rows_per_step:
        own = whole[place.rank :: place.ranks]
        yield Step(micro_batches(own, micro_batch, place), whole[-1].position)


def micro_batches(rows: Sequence[Row], micro_batch: int, place: Place) -> list[dict[str, Tensor]]:
    """Rows of one process as micro batches; arguments as of `steps`."""
    batches = []
    for i in range(0, len(rows), micro_batch):
        part = rows[i : i + micro_batch]
        batches.append(place.cut(answers_of(part) | with_targets(stack(part))))
    return batches


def with_targets(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows with `targets` [R, T], what each token predicts (-100 where that is nothing), in place of `labels`."""
    targets = F.pad(rows["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": rows["input_ids"], "position_ids": rows["position_ids"], "targets": targets}


def answers_of(rows: Sequence[Row]) -> dict[str, Tensor]:
    """`answers` [R, T], the next token where the row itself tells it (-100 elsewhere), if rows say so."""
    known = [row.answers for row in rows if row.answers is not None]
    if not known:
        return {}
    return {"answers": F.pad(torch.from_numpy(np.stack(known)).long()[:, 1:], (0, 1), value=IGNORED)}


class Background:
    """Runs an iterator of steps in a thread, a few steps ahead. Use as a context manager; errors come out here."""

    def __init__(self, source: Iterator[Step]) -> None:
        self._source = source
        self._queue: queue.Queue[Step | BaseException | None] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="training rows", daemon=True)

    def __enter__(self) -> Iterator[Step]:
        self._thread.start()
        return self._steps()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            self._queue.get_nowait()  # lets a thread that waits for room see the stop
        self._thread.join()

    def _steps(self) -> Iterator[Step]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            for step in self._source:
                self._put(step)
                if self._stop.is_set():
                    return
            self._put(None)
        except Exception as error:  # handed to the thread that waits for rows, whatever it is
            self._put(error)

    def _put(self, item: Step | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
