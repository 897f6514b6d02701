"""Files of text that must stay what they were when a run opened them, and their bytes without a mapping of memory."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from sse_convert.checkpoints.identity import data_digest
from sse_convert.data.teacher_samples import cache_folder
from sse_convert.errors import DataError
from sse_convert.files import digest, write_text

_DIGEST = re.compile("[0-9a-f]{64}")
Stamp = tuple[int, int, int, int]
_FIRST_BLOCK = 1 << 16
_LARGEST_BLOCK = 8 << 20


class WatchedFiles:
    """Remembers the content of files.

    Args:
        files: to watch.

    Raises:
        DataError: one cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stamps = [stamp_of(path) for path in files]
        self._digests = [_digest(path, stamp) for path, stamp in zip(files, self._stamps, strict=True)]

    def check(self, i: int) -> None:
        """Make sure that what was read of file i is what was there at first. New dates alone do not matter.

        Raises:
            DataError: the content is another one, or gone.
        """
        path, stamp = self._files[i], stamp_of(self._files[i])
        if stamp != self._stamps[i]:
            if _digest(path, stamp) != self._digests[i]:
                raise changed(path)
            self._stamps[i] = stamp

    def digest(self) -> str:
        """SHA-256 of all names and contents."""
        return data_digest([[path.name, found] for path, found in zip(self._files, self._digests, strict=True)])


class FileBytes:
    """The bytes of an open file, for searching. A file that is cut meanwhile is an error, not the end of the process.

    Args:
        file: open for reading.
        path: its name, for errors.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._handle, self._path = file.fileno(), path
        self._size = os.fstat(self._handle).st_size

    def __len__(self) -> int:
        return self._size

    def part(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, or to the end of the file.

        Raises:
            DataError: the file has become shorter.
        """
        wanted = min(end, self._size) - start
        data = os.pread(self._handle, max(0, wanted), start)
        if len(data) < wanted:
            raise changed(self._path)
        return data

    def find(self, mark: bytes, start: int, end: int | None = None) -> int:
        """Where `mark` first lies within the bytes from `start` to `end`; -1 where it does not."""
        end, block = self._size if end is None else min(end, self._size), _FIRST_BLOCK
        while start < end:
            found = self.part(start, min(start + block, end)).find(mark)
            if found >= 0:
                return start + found
            start, block = start + max(1, block - len(mark) + 1), min(2 * block, _LARGEST_BLOCK)
        return -1

    def rfind(self, mark: bytes, start: int, end: int) -> int:
        """Where `mark` last lies within the bytes from `start` to `end`, all read at once; -1 where it does not."""
        found = self.part(start, end).rfind(mark)
        return start + found if found >= 0 else -1


def changed(path: Path) -> DataError:
    """That a file is not what it was."""
    return DataError(
        f"{path} was {'changed' if path.exists() else 'deleted'} while it was read",
        expected="text that stays what it was when the run began",
        fix="put the file back as it was, and run again",
    )


def stamp_of(path: Path) -> Stamp:
    """What changes with a file's content, and with some other things."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise changed(path) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", expected="a readable file") from error
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@functools.cache
def _digest(path: Path, stamp: Stamp) -> str:
    """SHA-256 of a file's content, read once while its stamp stays."""
    try:
        return made_once([(path, stamp)], lambda: digest(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", expected="a readable file") from error


def made_once(files: Sequence[tuple[Path, Stamp]], make: Callable[[], str], what: str = "") -> str:
    """A digest of what files hold. Where processes were launched together, one on each machine makes it, or one of all
    if they share the cache; the others find it there. Each makes it where the cache cannot be written.

    Args:
        files: with their stamps.
        make: reads them.
        what: of their content is meant; empty for all.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return make()
    key = data_digest([what, *((str(path.resolve()), *stamp) for path, stamp in files)])
    kept = cache_folder() / "text-digests" / key
    lock = FileLock(kept.with_suffix(".lock"))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:
        return make()
    try:
        if kept.is_file() and _DIGEST.fullmatch(found := kept.read_text(encoding="ascii", errors="replace")):
            return found
        found = make()
        write_text(kept, found)
    finally:
        lock.release()
    return found
