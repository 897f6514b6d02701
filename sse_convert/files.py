"""The one writer of result files: each appears whole and on disk, or not at all.

A folder of files does so as one, through `checkpoints.output_folder.new_folder`.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sse_convert.errors import DataError, OutputError
from sse_convert.report import json_ready

_PIECE = 8 << 20
"""bytes that are hashed at a time"""
_UNFINISHED = re.compile(r"\..+\.(\d+\.tmp|\w+\.partial)")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to write, renamed to it at the end; folders above are made, an older file replaced.

    What a killed process left of an earlier one is removed.

    Raises:
        OutputError: the file cannot be written.
    """
    temporary = _temporary(path)
    try:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent, f".{glob.escape(path.name)}.*.tmp")
            temporary.touch()
            with held(temporary):
                yield temporary
                _publish(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: Path) -> None:
    """Make sure that a file can be put at a path, before what it is to hold is made; folders above are.

    Raises:
        OutputError: it cannot.
    """
    with _naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        _temporary(path).touch()
        _temporary(path).unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}",
            expected="room and permission to write",
            fix="free space, or choose another name",
        ) from error


def check_result(path: Path | None) -> None:
    """Refuse to put a result where it cannot be written, or in the place of a file of another kind, such as a recipe or
    a text.

    Args:
        path: where the result is to go, if anywhere; an older one in .json is replaced.

    Raises:
        OutputError: there is something else, or the file cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() != ".json" and path.exists():
        raise OutputError(
            f"{path} exists and is no .json file",
            expected="a new name, or an older result in .json, which is replaced",
            fix="choose another name, or delete the file",
        )
    check_writable(path)


def text_from(read: Callable[[], str], where: str) -> str:
    """What reading gives.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        text = read()
        text.encode()
    except UnicodeError as error:
        raise DataError(f"{where} is no UTF-8 text", expected="text in UTF-8", fix="convert it to UTF-8") from error
    return text


def write_json(path: Path, data: Any, *, indent: int = 1) -> None:
    """Write data as JSON; what JSON cannot say (NaN, paths) becomes what it can.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(path, json.dumps(json_ready(data), indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8.

    Raises:
        OutputError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a file or folder to the end; the operating system lets go of it with this process.

    Yields:
        Whether it is ours: not if another process holds it, or the file system knows no locks.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove files and folders that killed processes began to write; what a living one holds stays."""
    for found in folder.glob(pattern):
        with contextlib.suppress(OSError), held(found) as ours:
            if ours and found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
            elif ours:
                found.unlink()


def is_leftover(name: str) -> bool:
    """Whether a name is one that a file or folder has while it is written."""
    return _UNFINISHED.fullmatch(name) is not None


def copy_folder(source: Path, target: Path) -> None:
    """Copy all that is in a folder, but modes and dates, which not every file system takes."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_dir():
            copy_folder(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def digest(path: Path, seen: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file's content, in hexadecimal; read in pieces, whatever its size.

    Args:
        path: the file.
        seen: called with the bytes of each piece that was read.
    """
    found, buffer = hashlib.sha256(), memoryview(bytearray(min(path.stat().st_size + 1, _PIECE)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(buffer[:count])
            if seen is not None:
                seen(count)
    return found.hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or a folder with everything in it, to the disk: done before either is renamed to its name.

    Raises:
        OSError: the disk reports a failed write.
    """
    if path.is_dir():
        for below in path.iterdir():
            sync(below)
        sync_folder(path)
    else:
        _sync_one(path)


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk, but not what is in its files; where a file system cannot, nothing happens."""
    with contextlib.suppress(OSError):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name once its content is on disk, so that a crash leaves the old file or the new one."""
    _sync_one(temporary)
    temporary.replace(path)
    sync_folder(path.parent)
