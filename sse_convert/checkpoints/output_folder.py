"""Output folders that appear whole or not at all, and files linked or copied into them."""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sse_convert.checkpoints.hub import cached_blob
from sse_convert.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Link = Literal["auto", "hard", "copy"]
"""what is asked for: links into the hub cache and copies of anything else, links wherever they can be, or copies"""
Placed = Literal["hard", "clone", "copy"]
"""what was done; a clone shares the data on disk until one of the two is written"""
_FICLONE = 0x40049409
"""Linux's request to clone a file"""
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}


def check_output(out: Path) -> None:
    """Make sure that `out` can be created; the folders above it are.

    Raises:
        OutputError: it exists, or its parent cannot be created or written.
    """
    if out.exists() or out.is_symlink():
        raise _exists(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent)).rmdir()
    except OSError as error:
        raise OutputError(
            f"{out.parent} is not writable: {error.strerror}",
            expected="a folder you can write to",
            fix="choose another folder",
        ) from error


def _exists(out: Path) -> OutputError:
    return OutputError(
        f"output folder {out} exists",
        expected="a folder that does not exist yet",
        fix="remove it or choose another name",
    )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` to fill; renamed to `out` at the end, removed on any failure or Ctrl-C.

    Raises:
        OutputError: see `check_output`; also when the disk is full.
    """
    check_output(out)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        partial.rename(out)
    except OSError as error:
        if error.errno in _TAKEN and out.exists():
            raise _exists(out) from error
        if error.errno in _FULL:
            raise OutputError(
                f"the disk is full while writing {out}",
                expected="free space for the new files",
                fix="free space or choose another disk; nothing was left behind",
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def place(source: Path, target: Path, link: Link) -> Placed:
    """Make `target` the file `source`: a hard link, or a clone or copy where links are not asked for or impossible.

    Symbolic links (the hub cache holds them) are followed, so that the data itself is linked.

    Args:
        source: the file.
        target: its new name.
        link: `auto` links files of the hub cache alone, which nobody edits: an edit of a link changes both names.

    Returns:
        What was done.
    """
    wanted = link == "hard" or (link == "auto" and cached_blob(source) is not None)
    source = source.resolve()
    if wanted:
        try:
            os.link(source, target)
            return "hard"
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
    if _cloned(source, target):
        return "clone"
    shutil.copyfile(source, target)
    return "copy"


def can_clone(source: Path, folder: Path) -> bool:
    """Whether copies of a file into a folder take no room, found by making one."""
    trial = folder / ".clone"
    found = _cloned(source.resolve(), trial)
    trial.unlink(missing_ok=True)
    return found


def _cloned(source: Path, target: Path) -> bool:
    """Clone a file where the file system can (Btrfs, XFS, bcachefs); takes no time and no room."""
    if fcntl is None or not sys.platform.startswith("linux"):
        return False
    with source.open("rb") as old, target.open("xb") as new, contextlib.suppress(OSError):
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return True
    target.unlink()
    return False


def check_space(out: Path, needed: int) -> None:
    """Make sure that the disk of `out` has `needed` bytes free, before anything long starts.

    Raises:
        OutputError: it has not.
    """
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OutputError(
            f"{out.parent} has {free / 1e9:.1f} GB free",
            expected=f"{needed / 1e9:.1f} GB",
            fix="free space, choose another disk, or link instead of copying",
        )
