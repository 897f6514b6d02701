"""Freed memory is kept for the next block of its size, and threads sleep soon, unless the user says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from sse_convert.cli import runner
from sse_convert.cli.app import app
from sse_convert.process_memory import LARGEST, LIMITS, SPINS, share_cores

HUGE_PAGES_OFF = 41
"""PR_SET_THP_DISABLE: with huge pages a fault brings 512 pages"""
PROGRAM = """
import ctypes, resource
ctypes.CDLL(None).prctl({huge_pages_off}, 1, 0, 0, 0)
from sse_convert.process_memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
for i in range(25):
    if i == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray({size})
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGE = os.sysconf("SC_PAGE_SIZE")
ROUNDS = 20

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def faults(size: int, *, kept: bool, **variables: str) -> float:
    """Page faults of a block of so many bytes, made again and again, in pages of it."""
    own = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(huge_pages_off=HUGE_PAGES_OFF, kept=kept, size=size)],
        env={**own, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout) / (ROUNDS * size / PAGE)


@pytest.mark.parametrize("size", [2**20, LARGEST // 2])
def test_a_block_of_the_same_size_costs_no_new_pages(size: int) -> None:
    assert faults(size, kept=False, MALLOC_MMAP_THRESHOLD_="131072") > 0.9, "the kernel gives nothing back by itself"
    assert faults(size, kept=True) < 0.1


def test_larger_blocks_are_given_back() -> None:
    assert faults(2 * LARGEST, kept=True) > 0.9


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_the_user_stay(name: str) -> None:
    assert faults(2**20, kept=True, **{name: "131072"}) > 0.9


def test_commands_and_scripts_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    for name in ("keep_freed_memory", "share_cores"):
        monkeypatch.setattr(runner, name, lambda name=name: kept.append(name))
    runner.run_app(app, ["--version"])
    runner.reporting_errors(lambda: None)()
    assert kept == ["keep_freed_memory", "share_cores"] * 2


@pytest.mark.parametrize(
    ("given", "spins"), [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch, given, spins) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    share_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
