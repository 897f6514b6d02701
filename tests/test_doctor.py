"""What `doctor` says of threads and idle cores."""

from pathlib import Path

import psutil
import pytest

from sse_convert import doctor


@pytest.mark.parametrize(
    ("used", "quota", "idle"),
    [
        ([0, 0, 0, 0], None, 4),
        ([100, 90, 5, 0], None, 2),
        ([100, 100, 100, 100], None, 1),
        ([0, 0, 0, 0], "200000 100000", 2),
        ([0, 0, 0, 0], "max 100000", 4),
        ([0, 0, 0, 0], "50000 100000", 1),
    ],
)
def test_idle_cores(
    used: list[float], quota: str | None, idle: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: used)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(doctor, "CPU_TIME", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert doctor.idle_cores() == idle


@pytest.mark.parametrize(("threads", "idle", "said"), [(4, 4, False), (4, 3, False), (3, 2, True), (64, 2, True)])
def test_more_threads_than_idle_cores(threads: int, idle: int, said: bool) -> None:
    problems = doctor.thread_problems(threads, idle)
    assert len(problems) == said
    assert all(f"Set OMP_NUM_THREADS={idle}" in problem for problem in problems)
