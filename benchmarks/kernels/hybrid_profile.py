"""Where the time of a training or decode step goes: GPU kernels by total time, launches and host syncs."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

TOP = 20
NAME_LENGTH = 120


def gpu_kernels(run: Callable[[], Any]) -> list[Any]:
    """Averages by name of the GPU kernels (copies and fills too) of one run, the slowest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    kernels = [event for event in on_gpu if not getattr(event, "is_user_annotation", False)]
    return sorted(kernels, key=lambda event: -event.self_device_time_total)


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """One run on the current GPU, after one untimed: its slowest kernels, number of launches and host syncs."""
    run()
    kernels = gpu_kernels(run)
    return {
        "gpu_ms": sum(kernel.self_device_time_total for kernel in kernels) / 1e3,
        "launches": sum(kernel.count for kernel in kernels),
        "host_syncs": host_syncs(run),
        "kernels": [
            {"name": kernel.key[:NAME_LENGTH], "count": kernel.count, "ms": kernel.self_device_time_total / 1e3}
            for kernel in kernels[:TOP]
        ],
    }


def host_syncs(run: Callable[[], Any]) -> dict[str, int]:
    """How often one run makes the host wait for the GPU, by the line of Python that does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found: dict[str, int] = {}
    for warning in caught:
        if "synchronizing" in str(warning.message):
            place = "/".join(warning.filename.split("/")[-3:]) + f":{warning.lineno}"
            found[place] = found.get(place, 0) + 1
    return found
