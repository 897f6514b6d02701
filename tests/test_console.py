"""What takes long says so, without a terminal too: soon, again and again, with the time left."""

import io
import time

import pytest
from rich.console import Console

from sse_convert import console
from sse_convert.console import progress, say, starting


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


def test_a_command_that_says_nothing_says_that_it_has_begun(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with starting("eval"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "starting eval: 0/1\n"
    for first in (lambda: say("reading"), lambda: progress("reading", 1).__enter__()):
        with starting("eval"):
            first()
            time.sleep(0.1)
    assert "starting" not in capsys.readouterr().err


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_speaks_at_a_time(
    elsewhere: bool, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if elsewhere:
        monkeypatch.setenv("RANK", "1")
    with progress("outer", 1), progress("inner", 1):
        time.sleep(0.1)
    assert capsys.readouterr().err == ("" if elsewhere else "outer: 0/1\n")


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
    ("done", "advances", "line"),
    [
        (0, [], "stage: 0/100"),
        (0, [(0, 4)], "stage: 4/100, loss 3.1"),
        (0, [(0, 4), (36, 2)], "stage: 6/100, loss 3.1"),  # no tenth of it is done
        (0, [(36, 20)], "stage: 20/100, 2 min left, loss 3.1"),
        (0, [(240, 50)], "stage: 50/100, 4 min left, loss 3.1"),
        (90, [], "stage: 90/100"),  # by an earlier run
        (90, [(36, 1)], "stage: 91/100, 5 min left, loss 3.1"),
        (0, [(36, 99)], "stage: 99/100, below 1 min left, loss 3.1"),
        (0, [(36, 100)], "stage: 100/100, below 1 min left, loss 3.1"),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_is_said_from_the_first_tenth_on(
    done: float, advances: list[tuple[float, float]], line: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = io.StringIO()
    monkeypatch.setattr(console, "stderr", lambda: Console(file=shown, force_terminal=terminal, width=120))
    with progress("stage", 100, done) as bar:
        for moment, advance in advances:
            now[0] = moment
            bar.update(advance, note="loss 3.1")
        assert bar.line() == line
    left = [part for part in line.split(", ") if part.endswith(" left")]
    assert not terminal or all(part in shown.getvalue() for part in left)
