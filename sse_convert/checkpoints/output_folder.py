"""Output folders that appear whole or not at all, and files linked or copied into them."""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sse_convert.checkpoints.hub import cached_blob
from sse_convert.errors import OutputError
from sse_convert.files import copy_folder, held, remove_leftovers, sync, sync_folder
from sse_convert.process_memory import memory_for
from sse_convert.report import format_bytes

Link = Literal["auto", "hard", "copy"]
"""what is asked for: links into the hub cache and copies of anything else, links wherever they can be, or copies"""
Placed = Literal["hard", "clone", "copy"]
"""what was done; a clone shares the data on disk until one of the two is written"""
_FICLONE = 0x40049409
"""Linux's request to clone a file"""
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PARTIAL = ".partial"
TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
"""what a rename or a new folder meets where another run was first"""


def check_output(out: Path) -> None:
    """Make sure that `out` can be created; the folders above it are.

    Raises:
        OutputError: it exists, or its parent cannot be created or written.
    """
    if out.exists() or out.is_symlink():
        raise _exists(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = _make_partial(out)
        with contextlib.suppress(FileNotFoundError):  # another run may have taken it for a leftover
            probe.rmdir()
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
    """A temporary sibling of `out` to fill; on disk and renamed to `out` at the end, removed on any failure or Ctrl-C.

    One that a killed process left is removed first.

    Raises:
        OutputError: see `check_output`; also when the disk is full.
    """
    check_output(out)
    remove_partial(out)
    partial = _make_partial(out)
    try:
        with held(partial), memory_for(f"writing {out}"):
            yield partial
            with contextlib.suppress(OSError):  # exFAT, CIFS and others have no modes
                partial.chmod(0o777 & ~_umask())
            sync(partial)
            partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        if error.errno in TAKEN and out.exists():
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


def move_folder(folder: Path, out: Path) -> None:
    """Move a finished folder to `out`, whole. What is at `out` already was moved there before.

    Raises:
        OutputError: it cannot be written.
    """
    if not out.exists():
        try:
            folder.rename(out)
        except OSError as error:
            if error.errno != errno.EXDEV:  # another disk
                raise
            with new_folder(out) as partial:
                copy_folder(folder, partial)
        sync_folder(out.parent)
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, later: Sequence[Path]) -> Path:
    """Move a finished stage and what was made from it into a folder of their own beside it, the stage last: killed in
    between, the next start does the rest.

    Args:
        folder: of the stage.
        later: what was made from it; the newest is moved first.

    Returns:
        Where they are now.
    """
    names = (f"outdated-{folder.name}", *(f"outdated-{folder.name}-{i}" for i in range(2, 1000)))
    place = next(place for name in names if not ((place := folder.with_name(name)) / folder.name).exists())
    place.mkdir(exist_ok=True)
    for path in (*reversed(later), folder):
        shutil.move(path, place / path.name)
    sync_folder(folder.parent)
    return place


def remove_partial(out: Path) -> None:
    """Remove what killed processes began to write for `out`; what a living one holds stays."""
    remove_leftovers(out.parent, f".{glob.escape(out.name)}.*{_PARTIAL}")


def _make_partial(out: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=_PARTIAL, dir=out.parent))


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
    if not sys.platform.startswith("linux"):
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
            f"{out.parent} has {format_bytes(free)} free",
            expected=format_bytes(needed),
            fix="free space, choose another disk, or link instead of copying",
        )
