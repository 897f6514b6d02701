"""Launching kernels at little cost for the host.

Triton's own launch inspects every argument each time, for tens of microseconds. Here a kernel that was compiled for
arguments of the same kinds is launched as it is. The kinds are what Triton compiles for: types and alignment of
pointers, which arguments are None, whether integers need 64 bits, and compile-time constants.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""bytes; Triton compiles for pointers at multiples of them apart"""

COMPILERS = 4
"""kernels that are compiled side by side; more threads wait for each other's Python"""

_compiled: dict[Hashable, Any] = {}
_compiling: list[Future[Any]] | None = None
"""kernels in the making, where launches only compile"""
_pool = functools.cache(lambda: ThreadPoolExecutor(COMPILERS))


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, registers: int | None = None, **constants: Any
) -> None:  # fmt: skip
    """Launch a kernel on the current device.

    Args:
        kernel: a jitted function that specialises on none of its integers.
        grid: programs, in one to three dimensions.
        args: its arguments up to the compile-time constants: tensors, numbers, None, and tuples of these.
        warps: per program.
        registers: most that a thread may use.
        constants: the rest of its parameters, in their order.
    """
    options: dict[str, int] = {"num_warps": warps} if registers is None else {"num_warps": warps, "maxnreg": registers}
    if not _on_gpu():
        kernel[grid](*args, **constants, **options)
        return
    if _compiling is not None:
        _compiling.append(
            _pool().submit(_compile, torch.cuda.current_device(), kernel, args, {**constants, **options, "grid": grid})
        )
        return
    values = tuple(constants.values())
    key = (kernel, torch.cuda.current_device(), warps, registers, values, tuple(map(_kind, args)))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*args, *values)


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Compile what is launched inside side by side, in every thread, and run none of it: what kernels would write stays
    as it was allocated. What cannot be compiled says so when it is launched after all. On a GPU; elsewhere launches are
    what they are.
    """
    global _compiling
    made: list[Future[Any]] = []
    _compiling = made
    try:
        yield
    finally:
        _compiling = None
    wait(made)


def _compile(device: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let Triton compile a kernel for a device and keep it, with its launcher: in Triton 3.6 a C program of its own."""
    with torch.cuda.device(device):
        _ = kernel.warmup(*args, **options).run


@functools.cache
def _on_gpu() -> bool:
    """Else kernels are interpreted, or only compiled."""
    return torch.cuda.is_available()


def _kind(argument: Any) -> Hashable:
    """Equal for arguments that one compiled kernel serves."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, int):
        return argument.bit_length() > 31
    return type(argument).__name__
