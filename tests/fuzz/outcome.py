"""One case: a command run in this process, and what came of it."""

import contextlib
import dataclasses as dc
import io
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from sse_convert.cli.app import app
from sse_convert.cli.runner import EXIT_CODES, run_app

CPU_SECONDS = 5.0
"""of one case; what takes longer counts as a hang"""
MEMORY_BYTES = 3 << 30
"""of address space beyond what the process has when a case begins"""
MOST_TEXT = 20_000
"""characters of an error message"""
REFUSALS = frozenset(EXIT_CODES) - {0, 1, 130}
Judge = Callable[[dict[str, Any]], str | None]
"""of a command's result: what is wrong with it, or None"""


@dc.dataclass(frozen=True)
class Outcome:
    """What came of a case: accepted (code 0), refused (by its exit code), or a fault with its reason."""

    code: int
    fault: str | None = None


class HangError(BaseException):
    """A case took too long; no `except Exception` swallows it."""


def run_command(
    arguments: Sequence[str], judge: Judge, commands: typer.Typer = app, refusal: Judge = lambda error: None
) -> Outcome:
    """Run a command with `--json`, as `sse-convert` does.

    Args:
        arguments: of the command.
        judge: says what is wrong with the result of a command that succeeded.
        commands: those of `sse-convert`, or others.
        refusal: says what is wrong with the error of one that failed.
    """
    out, err = _Stream("strict"), _Stream("backslashreplace")  # as Python opens the two
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limits():
            code = run_app(commands, [*arguments, "--json"])
    except HangError:
        return Outcome(1, f"ran longer than {CPU_SECONDS:.0f} s")
    except BaseException as error:
        return Outcome(1, f"{type(error).__name__} left the command: {error}")
    return _outcome(code, out.written(), err.written(), judge, refusal)


def _outcome(code: int, out: str, err: str, judge: Judge, refusal: Judge) -> Outcome:
    if "Traceback" in err or code == 1:
        what = json.loads(out)["error"]["what"] if out else err.strip().splitlines()[-1]
        return Outcome(1, f"internal error: {what[:300]}")
    try:
        said = json.loads(out, parse_constant=_no_constant)
    except ValueError as error:
        return Outcome(code, f"stdout is not JSON: {error}")
    if code == 0:
        return Outcome(0, judge(said["result"]))
    if code not in REFUSALS:
        return Outcome(code, f"exit code {code} is no refusal")
    error = said["error"]
    if error["exit_code"] != code or not error["what"].strip() or not (error["expected"] or error["fix"]):
        return Outcome(code, f"no clear error: {error}"[:300])
    if len(err) > MOST_TEXT:
        return Outcome(code, f"a message of {len(err)} characters")
    return Outcome(code, refusal(error))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Stream(io.TextIOWrapper):
    """Text in memory, with the encoding of a terminal's streams."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)

    def written(self) -> str:
        """All that was written."""
        data: bytes = self.buffer.getvalue()  # type: ignore[attr-defined]
        return data.decode()


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Processor time and memory of a case."""

    def stop(*_: object) -> None:
        raise HangError

    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, stop)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
