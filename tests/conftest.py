"""Shared by all tests: uninitialised memory is NaN, and tests that need absent things are skipped with the reason."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked processes have none of its threads to wait for

import torch

from sse_convert.process_memory import keep_freed_memory
from tests.kernels.triton import interpreter
from tests.older_transformers import skip_faults

keep_freed_memory()
gc.disable()  # what is imported and collected stays: `pytest_collection_finish` enables it
interpreter.install()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of what a shell starts in the background; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of what nohup starts; tests send it too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

with torch.device("meta"):  # which functions a device context covers is looked up once: before any of them is replaced
    torch.empty(0)

seed_all = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""without a device, `torch.manual_seed` writes down the stack for each kind of device"""
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_faults(items)
    reasons = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "shared": None if SHARED.is_dir() else "needs ../shared",
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what has been imported and collected by now, which all stays to the end, and let it
    look seldom: tracers and the kernels' interpreter make many objects, whose collection took 5% of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file the same of what its tests imported: families of models, mostly."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it takes them too, or extension modules report what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the whole run, for text that a teacher samples: what takes pages longest."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "sampled"


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    seed_all(0)


@pytest.fixture(autouse=True)
def leave_the_disk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests write need not outlive the machine: an open file is looked at in place of waiting for the disk."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that skips part of a buffer leaves NaN there, not yesterday's right answer. Stand-ins without values that a
    compiler traces with are left alone."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            if type(x) is not torch.Tensor or not x.is_floating_point() or x.requires_grad:
                return x
            # torch 2.11 does not compile filling in place
            return torch.full_like(x, torch.nan) if torch.compiler.is_compiling() else x.fill_(torch.nan)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
