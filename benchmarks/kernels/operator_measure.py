"""Times, memory, host syncs and launches of a function on a GPU."""

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], tuple[Tensor, ...]]
Figures = dict[str, Any]
WINDOW_MS = 80.0
"""time spent on the repeats of a figure"""
REPEATS = (5, 100)
MIB = 2**20


def figures(run: Run, *, profiled: bool) -> Figures:
    """All of a function that has run at least once: eager, and as a CUDA graph unless it waits for the device."""
    result: Figures = {"extra_mib": round(extra_memory(run) / MIB, 2), "syncs": host_syncs(run), "eager": clock(run)}
    if profiled:
        result |= launches(run)
    if result["syncs"]:
        result["graph"] = f"cannot be captured: waits for the device {result['syncs']} times a call"
    else:
        result["graph"] = _as_graph(run)
    return result


def clock(run: Callable[[], Any]) -> Figures:
    """Milliseconds by device events, the L2 cache flushed before each repeat: median, 10th and 90th percentile."""
    estimate = min(_once(run) for _ in range(2))
    repeats = int(min(max(WINDOW_MS / max(estimate, 1e-3), REPEATS[0]), REPEATS[1]))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        _flush().zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    tenth = len(times) // 10
    return {"ms": round(statistics.median(times), 5), "p10_ms": round(times[tenth], 5),
            "p90_ms": round(times[-1 - tenth], 5), "repeats": repeats}  # fmt: skip


@cache
def _flush() -> Tensor:
    return torch.empty(256 * MIB, dtype=torch.int8, device="cuda")


def _once(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def extra_memory(run: Run) -> int:
    """Bytes at the peak beyond what was there before and what is returned."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results}
    return max(0, torch.cuda.max_memory_allocated() - before - sum(storages.values()))


def host_syncs(run: Run) -> int:
    """How often a call makes the host wait for the device, as torch reports it."""
    with warnings.catch_warnings(record=True) as caught, _sync_warnings():
        warnings.simplefilter("always")
        run()
    return sum("synchroniz" in str(warning.message) for warning in caught)


@contextmanager
def _sync_warnings() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(run: Run) -> Figures:
    """Kernels, copies and fills of one call, and the microseconds of the slowest of them by name."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    count, spent = 0, Counter[str]()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count += 1
            spent[event.name[:80]] += event.device_time_total
    return {"launches": count, "kernels_us": {name: round(us, 1) for name, us in spent.most_common(12)}}


def _as_graph(run: Run) -> Figures | str:
    """Times of the replays of a captured call, or why it cannot be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            run()
            graph.capture_begin()
            try:
                results = run()
            finally:
                graph.capture_end()
    except torch.OutOfMemoryError:
        return "cannot be captured: out of memory"
    except RuntimeError as problem:
        return f"cannot be captured: {problem}".splitlines()[0]
    torch.cuda.current_stream().wait_stream(stream)
    timing = clock(graph.replay)
    del results
    return timing


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.randint(127, (2**31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * clock(lambda: target.copy_(source))["ms"])
