"""What `doctor` says of threads, from measurements that are given, and that its calls run."""

from collections.abc import Callable

import pytest
import torch

from sse_convert.machine_speed import small_calls, time_calls


def clock(by_threads: dict[int, float]) -> Callable[[Callable[[], None]], float]:
    """Milliseconds of a call by the threads that torch has when it is measured, times what the call returns."""
    return lambda call: by_threads[torch.get_num_threads()] * call()


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)


CALLS = {"training": lambda: 3.0, "decoding": lambda: 1.0}


@pytest.mark.parametrize(
    ("by_threads", "said"),
    [
        ({1: 10.0, 2: 40.0, 4: 100.0}, ["4 threads take 10.0 times as long as 1", "OMP_NUM_THREADS=1"]),
        ({1: 90.0, 2: 50.0, 4: 100.0}, ["4 threads take 2.0 times as long as 2", "OMP_NUM_THREADS=2"]),
        ({1: 90.0, 2: 70.0, 4: 100.0}, []),
        ({1: 300.0, 2: 150.0, 4: 80.0}, []),
    ],
)
def test_fewer_threads_that_are_faster_are_named(by_threads: dict[int, float], said: list[str]) -> None:
    milliseconds, problems = time_calls(CALLS, 4, clock(by_threads))
    assert len(problems) == bool(said)
    assert all(part in problems[0] for part in said)
    assert torch.get_num_threads() == 4
    assert milliseconds["training"] == 3 * by_threads[4]
    assert milliseconds["  with 1 of 4 threads: decoding"] == by_threads[1]
    assert milliseconds["  with 2 of 4 threads: training"] == 3 * by_threads[2]


def test_the_call_that_suffers_most_is_named() -> None:
    calls = {"training": lambda: 1.0, "decoding": lambda: 5.0 if torch.get_num_threads() == 4 else 1.0}
    problem = time_calls(calls, 4, clock(dict.fromkeys((1, 2, 4), 1.0)))[1][0]
    assert "5.0 times" in problem
    assert "(decoding)" in problem


def test_one_thread_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    milliseconds, problems = time_calls(CALLS, 1, clock({1: 2.0}))
    assert milliseconds == {"training": 6.0, "decoding": 2.0}
    assert problems == []


def test_what_is_timed_runs() -> None:
    calls = small_calls("cpu")
    assert len(calls) == 4
    for call in calls.values():
        call()
