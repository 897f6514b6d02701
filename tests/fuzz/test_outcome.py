"""What counts as a fault: the harness itself finds each kind."""

import itertools
import math

import pytest
import typer

from sse_convert.cli.runner import add_command
from sse_convert.errors import DataError
from sse_convert.report import TextReport
from tests.fuzz import judges, outcome
from tests.fuzz.outcome import Outcome, run_command

made = typer.Typer(name="", pretty_exceptions_enable=False, rich_markup_mode=None)


def command(name):
    """Register a function as a command."""

    def register(function):
        add_command(made, name, function, after_interrupt="", to_stdout=False)

    return register


@command("bug")
def _bug() -> TextReport:
    raise KeyError("x")


@command("hang")
def _hang() -> TextReport:
    for _ in itertools.count():
        pass
    raise AssertionError


@command("unclear")
def _unclear() -> TextReport:
    raise DataError("something is wrong")


@command("clear")
def _clear() -> TextReport:
    raise DataError("something is wrong", fix="mend it")


@command("long")
def _long() -> TextReport:
    raise DataError("x" * 30_000, fix="mend it")


@command("fine")
def _fine() -> TextReport:
    return TextReport({"length": 3}, [])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("bug", "internal error: KeyError: 'x'"),
        ("hang", "ran longer than"),
        ("unclear", "no clear error"),
        ("long", "a message of 30"),
        ("clear", None),
        ("fine", None),
    ],
)
def test_every_kind_of_fault_is_found(monkeypatch, tmp_path, name, fault):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(outcome, "CPU_SECONDS", 0.2)
    found = run_command([name], judges.no_number_missing, made)
    assert (found.fault or "").startswith(fault or "")
    assert (found.fault is None) == (fault is None)


def test_a_wrong_result_is_a_fault():
    assert run_command(["fine"], lambda result: "wrong", made) == Outcome(0, "wrong")
    assert run_command(["fine"], judges.plan_numbers, made) == Outcome(0)


def test_numbers_that_are_not_finite_are_wrong():
    assert judges.plan_numbers({"stages": [{"flops": None}]}) == "flops is not finite"
    assert judges.plan_numbers({"stages": [{"flops": math.inf}]}) == "flops is inf"


def test_text_is_compared(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("w3 w4 mine w5 w6 w7 w8 w9 w10")
    right = ["w3", "w4", "w0", "w5", "w6", "w7", "w8", "w9"]
    assert judges.same_text(path, {}, {"words": right}) is None
    assert judges.same_text(path, {}, {"words": ["w4", *right[1:]]}) == "other words than the text's"
    assert judges.same_text(path.with_suffix(".csv"), {}, {"words": right}) == ".csv was read as plain text"
