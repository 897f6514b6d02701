"""One run at a time in a folder: a locked file that says who runs there, on which machine and since when.

A run that ends removes the file, also when it fails. The operating system releases the lock of a killed run, whose file
stays, and the next run says so. Machines that share a folder may not share locks. There the file's age counts: its
writer touches it as long as it lives. Where the file system knows no locks, a run of this machine lives as long as its
process does.
"""

import contextlib
import datetime as dt
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from sse_convert.console import say
from sse_convert.errors import TrainingError

LOCK = "lock"
BEAT_SECONDS = 20.0
"""between two signs of life"""
QUIET_SECONDS = 150.0
"""without a sign of life after which a run on another machine counts as ended; network file systems cache for 60"""
LONG_AGO_SECONDS = 3600.0
"""age of the last sign of life at which there is no waiting for another; beyond differences of clocks"""
SETTLE_SECONDS = 2.0
"""in which runs that began at once, without locks, have all written their files; the last one has the folder"""
_POLL_SECONDS = 1.0
_KINDS = {"host": str, "process": int, "began": float}
"""of what a lock file says"""


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder that exists.

    Raises:
        TrainingError: another run writes to it.
    """
    path = folder / LOCK
    handle, locks = _opened(path)
    with contextlib.ExitStack() as at_end:
        at_end.callback(os.close, handle)
        holder = _holder(path)
        if locks is None:
            raise _taken(folder, holder)
        if holder is not None:
            _require_ended(folder, holder, locks=locks)
        note = {"host": socket.gethostname(), "process": os.getpid(), "began": time.time()}
        path.write_text(json.dumps(note), encoding="utf-8")
        if not locks:
            _require_last(folder, note)
        at_end.callback(path.unlink, missing_ok=True)
        at_end.enter_context(_beating(path))
        yield


def _opened(path: Path) -> tuple[int, bool | None]:
    """The handle of a lock file, and whether it is locked now: None where another process has it, false where the file
    system knows no locks."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return handle, None
        except OSError:
            return handle, False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle, True
        os.close(handle)  # who held it has removed it since


def _holder(path: Path) -> dict[str, Any] | None:
    """Who wrote a lock file; None where it does not say."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} != _KINDS:
        return None
    return found


def _require_ended(folder: Path, holder: dict[str, Any], *, locks: bool) -> None:
    """Say that an earlier run ended without finishing; refuse where it seems to live, by its process or on another
    machine."""
    here = holder["host"] == socket.gethostname()
    if (not locks and _is_running(holder)) if here else _lives(folder / LOCK):
        raise _taken(folder, holder)
    say(f"{folder}: {_in_words(holder)}, has ended without finishing; going on from what it left")


def _is_running(holder: dict[str, Any]) -> bool:
    """Whether the process on this machine that wrote a lock file still runs; a later one may have its number."""
    try:
        process = psutil.Process(holder["process"])
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() < holder["began"] + 1)
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def _require_last(folder: Path, note: dict[str, Any]) -> None:
    """Make sure, without locks, that of the runs that began at once this one wrote last."""
    time.sleep(SETTLE_SECONDS)
    if (holder := _holder(folder / LOCK)) != note:
        raise _taken(folder, holder)


def _lives(path: Path) -> bool:
    """Wait for a sign of life from another machine."""
    seen = _touched(path)
    if time.time() - seen > LONG_AGO_SECONDS:
        return False
    say(f"{path} was written on another machine; waiting {QUIET_SECONDS:.0f} s for a sign of life")
    end = time.monotonic() + QUIET_SECONDS
    while _touched(path) == seen and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return _touched(path) > seen


def _touched(path: Path) -> float:
    """When, in seconds since 1970; 0 once the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touch a file now and then."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="run lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _taken(folder: Path, holder: dict[str, Any] | None) -> TrainingError:
    by = "" if holder is None else f": {_in_words(holder)}"
    return TrainingError(
        f"{folder}: another run writes to it{by}",
        expected="one run at a time; workers may have survived a launcher that was killed",
        fix="wait for the other run, or end its processes",
    )


def _in_words(holder: dict[str, Any]) -> str:
    age = dt.timedelta(seconds=max(0, int(time.time() - holder["began"])))
    return f"process {holder['process']} on {holder['host']}, begun {age} ago"
