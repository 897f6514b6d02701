"""What the C library does with memory that a process frees."""

import ctypes
import os
import sys

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
