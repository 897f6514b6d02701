"""Clocks, memory and surroundings of the end-to-end benchmark."""

import contextlib
import dataclasses as dc
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

GIB = 2**30
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""kernels that softmax layers may be given; torch raises an error where a forced one cannot run"""


@dc.dataclass(frozen=True, slots=True)
class Timing:
    """Repeats of one piece of work."""

    seconds: float
    """median"""
    spread: float
    """slowest over fastest"""
    repeats: int
    """timed runs"""
    warm: bool
    """whether an untimed run came first"""


def attention_choices(device: torch.device) -> tuple[str, ...]:
    """Attention kernels to try on a device; `default` leaves the choice to torch."""
    return tuple(ATTENTION) if device.type == "cuda" else ("default",)


def attention(choice: str) -> contextlib.AbstractContextManager[Any]:
    """Give softmax attention one kernel and no other."""
    return contextlib.nullcontext() if choice == "default" else sdpa_kernel(ATTENTION[choice])


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of one run, until the device has finished."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def measure(run: Callable[[], Any], device: torch.device, *, budget: float, cold_limit: float = float("inf")) -> Timing:
    """Time a piece of work: one untimed run, then up to three, as many as the budget allows, at least one.

    Args:
        run: the work.
        device: it runs on.
        budget: seconds after which no further repeat starts.
        cold_limit: a first run that takes longer counts, and is the only one (for work that compiles nothing).
    """
    first = timed(run, device)
    if first > cold_limit:
        return Timing(first, 1.0, 1, warm=False)
    times = [timed(run, device)]
    while len(times) < 3 and sum(times) < budget:
        times.append(timed(run, device))
    return Timing(statistics.median(times), max(times) / min(times), len(times), warm=True)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def peak_memory(device: torch.device, figures: dict[str, Any], name: str) -> Iterator[None]:
    """Put the most GiB that tensors took inside the block into `figures`; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        figures[name] = round(torch.cuda.max_memory_allocated(device) / GIB, 3)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to make the figures again."""
    cuda = device.type == "cuda"
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / GIB, 1) if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "triton": getattr(triton, "__version__", None),
        "transformers": transformers.__version__,
    }


def _program() -> tuple[str, ...]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ("python", sys.argv[0]) if spec is None else ("python", "-m", spec.name)


def commit() -> str:
    """The checkout's commit, `+changes` if the package differs from it; `COMMIT` where the checkout has no git."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=False).stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "sse_convert") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
