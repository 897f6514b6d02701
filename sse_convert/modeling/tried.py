"""The newest versions of libraries that this code was tried with. This file travels inside checkpoints."""

import functools
import importlib.metadata
import re
import warnings

TRIED = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
}
"""package -> version; constraints.txt pins the same ones"""


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def newer_than_tried() -> list[str]:
    """What is installed and newer than what was tried, each with both versions."""
    installed = {name: installed_version(name) for name in TRIED}
    return [
        f"{name} {version} (tried up to {TRIED[name]})"
        for name, version in installed.items()
        if version is not None and _numbers(version) > _numbers(TRIED[name])
    ]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


@functools.cache
def warn_of_newer() -> None:
    """Warn, once in a process, of libraries that are newer than the tried ones."""
    if found := newer_than_tried():
        warnings.warn(
            f"converted models were not tried with {', '.join(found)}; if results are odd, install what was tried, "
            "or a newer sse-convert",
            stacklevel=3,
        )
