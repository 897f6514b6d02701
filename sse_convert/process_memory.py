"""Memory and cores of the process: what its libraries do with them, and errors where memory is lacking."""

import contextlib
import ctypes
import errno
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from sse_convert.errors import HardwareError

LARGEST = 32 * 2**20
"""bytes of a block that is kept; glibc takes no larger limit in all its versions"""
MOST = 256 * 2**20
"""bytes that are kept at the end of the heap"""
LIMITS = {"MALLOC_TRIM_THRESHOLD_": (-1, MOST), "MALLOC_MMAP_THRESHOLD_": (-3, LARGEST)}
"""variable by which a user sets a limit -> its number in malloc.h, and ours"""


def keep_freed_memory() -> None:
    """Let glibc keep memory that is freed, for the next tensor of its size.

    It gives blocks of 128 KiB and more back to the kernel, which clears every page of the next one: a tenth of a small
    model's time on a CPU. Limits that the user has set stay, and other C libraries are left alone.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in LIMITS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, limit in LIMITS.values():
            mallopt(parameter, limit)


SPINS = 20_000
"""times that a thread looks for the others before it sleeps, about a millisecond. GNU's OpenMP looks for many, in which
another program's thread that has the other core does not run; with fewer, steps on an idle machine wait to be woken"""


def share_cores() -> None:
    """Let threads that wait for each other give up their core soon. Call before torch is imported.

    Beside one other busy process, training SmolLM2 on two cores took several times as long without. What the user has
    set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


LEAST = 128 * 2**20
"""bytes of addresses to begin anything with; where a limit leaves fewer, BLAS and libraries in Rust end the process"""
RESERVES = (32 * 2**20, 8 * 2**20, 2 * 2**20)
"""bytes that are kept for saying that memory is lacking, the first that can be had"""
LACKING = (
    "can't allocate memory",
    "Cannot allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "failed to map segment",
    "can't start new thread",
    "ThreadPoolBuildError",
    "std::bad_alloc",
)
"""what libraries say where memory, or room for the stack of a thread, is lacking"""


def reserve() -> list[bytearray]:
    """Room that its holder frees, by clearing the list, for what must be done without memory. It takes addresses alone
    until it is written."""
    for size in RESERVES:
        with contextlib.suppress(MemoryError):
            return [bytearray(size)]
    return []


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was made of, says that the machine has too little memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if any(words in str(cause) for words in LACKING):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def out_of_memory(doing: str, error: BaseException) -> HardwareError:
    """An error that says what the machine has too little memory for."""
    words = (str(error).strip().splitlines() or [""])[0]
    return HardwareError(
        f"the machine is out of memory while {doing}{f': {words}' if words else ''}",
        expected="less at a time, or more memory (`ulimit -v` may limit it)",
        fix="free memory, or lower the sizes that were asked for",
    )


def _addresses_left() -> float:
    """Bytes of addresses that the process may still take; infinite without a limit, or where it is not known."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or not sys.platform.startswith("linux"):
        return math.inf
    return limit - int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def memory_for(doing: str) -> Iterator[None]:
    """Say what was being done where memory is lacking.

    Raises:
        HardwareError: there was too little memory, or so few addresses are left that libraries would end the process.
    """
    try:
        if (left := _addresses_left()) < LEAST:
            raise MemoryError(f"{left / 2**20:.0f} MiB of its address space are left")
        yield
    except Exception as error:
        if isinstance(error, HardwareError) or not lacks_memory(error):
            raise
        raise out_of_memory(doing, error) from error
