"""Output folders that appear whole or not at all, and files linked or copied into them."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sse_convert.errors import OutputError

Link = Literal["hard", "copy"]
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


def place(source: Path, target: Path, link: Link) -> Link:
    """Make `target` the file `source`: a hard link, or a copy where asked for or where links are impossible.

    Symbolic links (the hub cache holds them) are followed, so that the data itself is linked.

    Returns:
        What was done.
    """
    source = source.resolve()
    if link == "hard":
        try:
            os.link(source, target)
            return "hard"
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
    shutil.copyfile(source, target)
    return "copy"


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
