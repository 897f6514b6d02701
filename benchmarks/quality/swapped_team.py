"""Trainings of swapped layers side by side: processes that share the rows and states of one teacher on one device."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
import torch.multiprocessing  # teaches pickle to share tensors, on a GPU and in shared memory

from benchmarks.quality.swapped_states import Bed

Work = Callable[..., Any]
"""a function of a module: task's arguments, then the bed"""
_bed: list[Bed] = []
"""of a worker"""


class Team:
    """Processes that hold the same bed; nothing of it is copied.

    Args:
        bed: rows and the teacher's states.
        jobs: processes.
        method: how they start; None forks on a CPU and spawns beside a GPU, whose driver does not survive a fork.
    """

    def __init__(self, bed: Bed, jobs: int, method: str | None = None) -> None:
        self._jobs = jobs
        context = torch.multiprocessing.get_context(
            method or ("spawn" if bed.teacher.device.type == "cuda" else "fork")
        )
        threads = max(1, (os.cpu_count() or 1) // jobs)
        self._pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(bed, threads))

    def results(self, work: Work, tasks: Sequence[tuple[Any, ...]], may_start: Callable[[], bool]) -> Iterator[Any]:
        """What `work` makes of the tasks, as they finish.

        Args:
            work: called in a worker.
            tasks: arguments, in the order in which they start.
            may_start: asked before each.
        """
        left, running = iter(tasks), set[Future[Any]]()
        while True:
            while len(running) < self._jobs and may_start() and (task := next(left, None)) is not None:
                running.add(self._pool.submit(_run, work, task))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


def _begin(bed: Bed, threads: int) -> None:
    torch.set_num_threads(threads)
    _bed.append(bed)


def _run(work: Work, task: tuple[Any, ...]) -> Any:
    return work(*task, _bed[0])
