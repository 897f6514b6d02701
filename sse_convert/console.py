"""What a person sees: messages, tables and progress on stderr. Stdout belongs to results.

Without a terminal on stderr there are no bars and no colour, and what takes long says so in lines. `NO_COLOR` is
honoured (by rich).
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from sse_convert.report import time_in_words

FIRST_LINE_SECONDS = 1.0
"""after which a step that goes on says its first line"""
LOG_EVERY_SECONDS = 30.0
ESTIMATED_FROM = 0.1
"""of the work, after which the time left is said"""


def stderr() -> Console:
    """A console on the current stderr (looked up at call time, so redirection works)."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


_spoken = threading.Event()
"""a command has said something"""
_speaking: list[str] = []
"""descriptions of what is done now"""


def say(message: str) -> None:
    """Print one plain line to stderr, with no markup interpretation of user text."""
    _spoken.set()
    stderr().print(message, markup=False)


@contextmanager
def starting(command: str) -> Iterator[None]:
    """Say that a command has begun, where it says nothing in its first second: it imports libraries or reads files."""

    def speak() -> None:
        if not _spoken.wait(FIRST_LINE_SECONDS):
            say(Bar(None, f"starting {command}", 1).line())

    _spoken.clear()
    speaker = threading.Thread(target=speak, name="starting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        _spoken.set()
        speaker.join()


class Bar:
    """Handle of a running progress bar."""

    def __init__(self, progress: Progress | None, description: str, total: float, done: float = 0.0) -> None:
        self._progress = progress
        self._description, self._note = description, ""
        self._total = total
        self._done = self._before = done
        self._begun = time.monotonic()
        self._task = None
        if progress is not None:
            self._task = progress.add_task(description, total=total, completed=int(done), note="", left=self.left)

    def update(self, advance: float = 1, note: str = "") -> None:
        """Move forward by `advance`; `note` (for example the loss) is shown behind the bar."""
        self._done += advance
        self._note = note
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=advance, note=note)

    def expect(self, left: float) -> None:
        """Say how much is left from here on, where that was not known before."""
        self._total = self._done + left
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total)

    def line(self) -> str:
        """How far it is, for a log: `choosing layers: 12/44, 3 min left, keeping 2 of 30`."""
        parts = [f"{self._description}: {self._done:.0f}/{self._total:.0f}", self.left(), self._note]
        return ", ".join(part for part in parts if part)

    def left(self) -> str:
        """The time left, `3 min left`; nothing before `ESTIMATED_FROM` of the work."""
        if self._done <= self._before or self._done < ESTIMATED_FROM * self._total:
            return ""
        hours = (time.monotonic() - self._begun) / 3600 * (self._total - self._done) / (self._done - self._before)
        return f"{time_in_words(hours)} left"


class _Left(ProgressColumn):
    """The bar's own time left: rich's knows none where an advance takes more than half a minute."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["left"]())


@contextmanager
def progress(description: str, total: float, done: float = 0.0) -> Iterator[Bar]:
    """A progress bar with elapsed time and time left; without a terminal, lines: one after `FIRST_LINE_SECONDS`, and
    one every `LOG_EVERY_SECONDS`, also while nothing moves. Within another's, that one speaks alone,
    and so does the first of several processes.

    Args:
        description: what is done.
        total: how much of it there is.
        done: by an earlier run, which took this one no time.
    """
    if _speaking or os.environ.get("RANK", "0") != "0":
        yield Bar(None, description, total, done)
        return
    _speaking.append(description)
    try:
        with _shown(description, total, done) as bar:
            yield bar
    finally:
        _speaking.clear()


@contextmanager
def _shown(description: str, total: float, done: float) -> Iterator[Bar]:
    """A bar that a person sees; one of a moment is gone from a terminal when it ends."""
    _spoken.set()
    began, console = time.monotonic(), stderr()
    if not console.is_terminal:
        bar, ended = Bar(None, description, total, done), threading.Event()
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
        _Left(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, transient=False) as bars:
        yield Bar(bars, description, total, done)
        bars.live.transient = time.monotonic() - began < FIRST_LINE_SECONDS


def _speak(bar: Bar, ended: threading.Event) -> None:
    wait = FIRST_LINE_SECONDS
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: nobody listens
        while not ended.wait(wait):
            say(bar.line())
            wait = LOG_EVERY_SECONDS
