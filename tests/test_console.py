"""What takes long says so, without a terminal too: soon, again and again, with the time left."""

import time

import pytest

from sse_convert import console
from sse_convert.console import Bar, progress


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(console, "LOG_EVERY_SECONDS", 0.2)


def test_lines_begin_soon_and_go_on_while_nothing_moves(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("choosing layers", 44):
        time.sleep(0.7)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert set(lines) == {"choosing layers: 0/44"}


def test_the_first_line_comes_within_two_seconds_and_others_every_half_minute() -> None:
    assert 0 < console.FIRST_LINE_SECONDS < 2
    assert console.LOG_EVERY_SECONDS == 30


def test_a_short_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("teacher shards", 2) as bar:
        bar.update()
    assert capsys.readouterr().err == ""


def test_lines_end_with_the_step_that_fails(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), progress("reading text", 1):
        raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("advances", "line"),
    [
        ([], "stage: 0/100"),
        ([(0, 4)], "stage: 4/100, loss 3.1"),
        ([(0, 4), (36, 2)], "stage: 6/100, loss 3.1"),  # no tenth of it is done
        ([(0, 0), (36, 20)], "stage: 20/100, 2 min left, loss 3.1"),
        ([(0, 90), (36, 1)], "stage: 91/100, 5 min left, loss 3.1"),  # 90 are of an earlier run
        ([(0, 50)], "stage: 50/100, loss 3.1"),
        ([(0, 0), (36, 99)], "stage: 99/100, below 1 min left, loss 3.1"),
        ([(0, 0), (36, 100)], "stage: 100/100, below 1 min left, loss 3.1"),
    ],
)
def test_the_time_left_is_said_from_the_first_tenth_on(
    advances: list[tuple[float, float]], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    bar = Bar(None, "stage", 100)
    for moment, advance in advances:
        now[0] = moment
        bar.update(advance, note="loss 3.1")
    assert bar.line() == line
