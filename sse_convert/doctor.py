"""What this machine has: versions, devices, operator backends with reasons, optional packages."""

import dataclasses as dc
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sse_convert import __version__
from sse_convert.modeling.tried import TRIED, installed_version, newer_than_tried
from sse_convert.report import format_bytes, json_ready

SUPPORTED = {"torch": ((2, 11), (3, 0)), "transformers": ((5, 17), (6, 0)), "accelerate": ((1, 15), (2, 0))}
"""package: lowest version, and the first that is too new"""
if sys.platform == "linux":
    SUPPORTED["triton"] = (3, 6), (4, 0)
REQUIRED = (*SUPPORTED, "peft", "safetensors", "huggingface_hub", "datasets", "typer", "jinja2")
LOOK_SECONDS = 0.5
"""in which cores are watched"""
CPU_TIME = Path("/sys/fs/cgroup/cpu.max")
"""what Linux says of a container's time: microseconds, or max, and of how many"""
MANY = 1.5
"""threads to an idle core that are too many"""
OPTIONAL = {
    "lm-eval": "eval: language-model-evaluation-harness",
    "wonderwords": "eval: word lists of lm-eval's RULER tasks",
}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """The state of the machine, and what is wrong with it."""

    versions: dict[str, str | None]
    """python, sse-convert and required packages; None when missing"""
    optional: dict[str, str | None]
    """optional packages; None when missing"""
    platform: str
    """operating system and machine"""
    cpu_threads: int
    """threads torch uses"""
    devices: list[dict[str, Any]]
    """accelerators: name, memory in bytes, whether bf16 is supported"""
    backends: dict[str, str]
    """operator backend to what it is, or why it is not available"""
    disk_free_bytes: int
    """in the working folder"""
    hub_login: bool
    """whether a hub token is stored or in the environment (the token itself is never shown)"""
    idle_cores: int
    """that other programs leave to this one, within its limits"""
    newer: list[str]
    """what is newer than the versions that this package was tried with"""
    problems: list[str]
    """what needs mending, each with its fix"""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dict(json_ready(self))

    def lines(self) -> list[str]:
        """The report for a person."""
        width = max(map(len, (*self.versions, *self.optional, *self.backends)))
        devices = [
            f"  {device['name']}, {format_bytes(device['memory_bytes'])}, bf16 {'yes' if device['bf16'] else 'no'}"
            for device in self.devices
        ]
        return [
            f"{self.platform}, {self.cpu_threads} threads, idle cores: {self.idle_cores}, "
            f"{format_bytes(self.disk_free_bytes)} free here",
            "versions",
            *(f"  {name:<{width}}  {version or 'MISSING'}{_tried(name)}" for name, version in self.versions.items()),
            "optional packages",
            *(
                f"  {name:<{width}}  {version or 'not installed'} ({OPTIONAL[name]})"
                for name, version in self.optional.items()
            ),
            "devices",
            *(devices or ["  no GPU: everything runs on the CPU"]),
            "operator backends",
            *(f"  {name:<{width}}  {state}" for name, state in self.backends.items()),
            f"hub login: {'yes' if self.hub_login else 'no (push and gated models need it: run `hf auth login`)'}",
            *(f"not tried: {version}" for version in self.newer),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            "no problems found" if not self.problems else f"{len(self.problems)} to mend",
        ]


def diagnose() -> DoctorReport:
    """Look around. Changes nothing."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "sse-convert": __version__}
    versions |= {name: installed_version(name) for name in REQUIRED}
    have_torch = versions["torch"] is not None
    threads, idle = _threads() if have_torch else os.cpu_count() or 1, idle_cores()
    devices = _devices() if have_torch else []
    return DoctorReport(
        versions=versions,
        optional={name: installed_version(name) for name in OPTIONAL},
        platform=f"{platform.system()} {platform.machine()}",
        cpu_threads=threads,
        devices=devices,
        backends=_backends() if have_torch else {},
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        hub_login=versions["huggingface_hub"] is not None and _hub_login(),
        idle_cores=idle,
        newer=newer_than_tried(),
        problems=[*_problems(versions), *([] if devices else thread_problems(threads, idle))],
    )


def idle_cores() -> int:
    """Cores that other programs leave to this one, at least 1: of those that it may run on, and no more than the time
    that a container gives it."""
    import psutil

    idle: int = round(sum(100 - used for used in psutil.cpu_percent(LOOK_SECONDS, percpu=True)) / 100)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (CPU_TIME.read_text(encoding="ascii").split() if CPU_TIME.is_file() else ("max", ""))[:2]
    return max(1, min(idle, allowed, allowed if quota == "max" else int(quota) // int(period)))


def thread_problems(threads: int, idle: int) -> list[str]:
    """A problem where threads wait for each other: torch takes more of them than there are cores."""
    if threads < MANY * idle:
        return []
    return [f"more threads ({threads}) than idle cores ({idle}), so that they wait. Set OMP_NUM_THREADS={idle}"]


def _tried(name: str) -> str:
    return f" (tried up to {TRIED[name]})" if name in TRIED else ""


def _problems(versions: dict[str, str | None]) -> list[str]:
    problems = []
    for name in REQUIRED:
        version = versions[name]
        if version is None:
            problems.append(f"{name} is missing: pip install {name}")
        elif name in SUPPORTED:
            low, high = SUPPORTED[name]
            numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
            if not low <= numbers < high:
                wanted = f">={low[0]}.{low[1]},<{high[0]}"
                problems.append(f"{name} {version} is not supported: pip install '{name}{wanted}'")
    return problems


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _devices() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        bf16 = properties.major >= 8
        found.append({"name": f"cuda:{index} {properties.name}", "memory_bytes": properties.total_memory, "bf16": bf16})
    return found


def _backends() -> dict[str, str]:
    from sse_convert.kernels import dispatch

    return {name: dispatch.explain(name) for name in dispatch.BACKENDS}


def _hub_login() -> bool:
    import huggingface_hub

    return huggingface_hub.get_token() is not None
