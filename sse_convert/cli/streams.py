"""Standard streams whose other end may be closed: `| head`, `2>&-`, a full disk. Work goes on without them."""

import io
import os
import sys
from typing import TextIO


class LastingStream(io.TextIOWrapper):
    """Text output that drops what nobody reads, once its reader has left; any other failure is raised once.

    What its encoding lacks is written as escapes.
    """

    def write(self, text: str) -> int:
        """Write a text; the number of its characters."""
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if not isinstance(error, BrokenPipeError):
            raise error


def open_streams() -> None:
    """Make the process's standard streams ones that last; a closed one reads and writes nothing."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - it stays open until the process ends
    sys.stdout = sys.__stdout__ = _lasting(sys.stdout)  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = _lasting(sys.stderr)  # type: ignore[misc,assignment]


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    encoding = stream.encoding
    return LastingStream(stream.detach(), encoding, "backslashreplace", line_buffering=True)
