"""What a person sees: messages, tables and progress on stderr. Stdout belongs to results.

Quiet when stderr is not a terminal: no bars, no colour. `NO_COLOR` is honoured (by rich).
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_EVERY_SECONDS = 30.0


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
        self._description = description
        self._total = total
        self._done = 0.0
        self._last_line = time.monotonic()
        self._task = progress.add_task(description, total=total, note="") if progress else None

    def update(self, advance: float = 1, note: str = "") -> None:
        """Move forward by `advance`; `note` (for example the loss) is shown behind the bar."""
        self._done += advance
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=advance, note=note)
        elif time.monotonic() - self._last_line > LOG_EVERY_SECONDS:
            self._last_line = time.monotonic()
            say(f"{self._description}: {self._done:.0f}/{self._total:.0f} {note}".rstrip())

    def expect(self, left: float) -> None:
        """Say how much is left from here on, where that was not known before."""
        self._total = self._done + left
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total)


@contextmanager
def progress(description: str, total: float) -> Iterator[Bar]:
    """A progress bar with elapsed time and ETA; without a terminal, one line every 30 seconds."""
    console = stderr()
    if not console.is_terminal:
        yield Bar(None, description, total)
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
