"""What a person sees: messages, tables and progress on stderr. Stdout belongs to results.

Without a terminal on stderr there are no bars and no colour, and what takes long says so in lines. `NO_COLOR` is
honoured (by rich).
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sse_convert.report import time_in_words

FIRST_LINE_SECONDS = 1.0
"""after which a step that goes on says its first line"""
LOG_EVERY_SECONDS = 30.0
ESTIMATED_FROM = 0.1
"""of the work, after which the time left is said"""


def stderr() -> Console:
    """A console on the current stderr (looked up at call time, so redirection works)."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one plain line to stderr, with no markup interpretation of user text."""
    stderr().print(message, markup=False)


class Bar:
    """Handle of a running progress bar."""

    def __init__(self, progress: Progress | None, description: str, total: float) -> None:
        self._progress = progress
        self._description, self._note = description, ""
        self._total = total
        self._done = 0.0
        self._begun: tuple[float, float] | None = None
        self._task = progress.add_task(description, total=total, note="") if progress else None

    def update(self, advance: float = 1, note: str = "") -> None:
        """Move forward by `advance`; `note` (for example the loss) is shown behind the bar."""
        self._done += advance
        self._note = note
        if self._begun is None:  # what an earlier run did is in the first advance, and took this one no time
            self._begun = time.monotonic(), self._done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=advance, note=note)

    def expect(self, left: float) -> None:
        """Say how much is left from here on, where that was not known before."""
        self._total = self._done + left
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total)

    def line(self) -> str:
        """How far it is, for a log: `choosing layers: 12/44, 3 min left, keeping 2 of 30`."""
        parts = [f"{self._description}: {self._done:.0f}/{self._total:.0f}", self._left(), self._note]
        return ", ".join(part for part in parts if part)

    def _left(self) -> str:
        if self._begun is None or self._done < ESTIMATED_FROM * self._total:
            return ""
        moment, before = self._begun
        if self._done <= before:
            return ""
        hours = (time.monotonic() - moment) / 3600 * (self._total - self._done) / (self._done - before)
        return f"{time_in_words(hours)} left"


@contextmanager
def progress(description: str, total: float) -> Iterator[Bar]:
    """A progress bar with elapsed time and ETA; without a terminal, lines: one after `FIRST_LINE_SECONDS`, and one
    every `LOG_EVERY_SECONDS`, also while nothing moves."""
    console = stderr()
    if not console.is_terminal:
        bar, ended = Bar(None, description, total), threading.Event()
        speaker = threading.Thread(target=_speak, args=(bar, ended), name="progress", daemon=True)
        speaker.start()
        try:
            yield bar
        finally:
            ended.set()
            speaker.join()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, transient=False) as bars:
        yield Bar(bars, description, total)


def _speak(bar: Bar, ended: threading.Event) -> None:
    wait = FIRST_LINE_SECONDS
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: nobody listens
        while not ended.wait(wait):
            say(bar.line())
            wait = LOG_EVERY_SECONDS
