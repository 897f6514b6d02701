"""The page of promises: every one names tests, and each of these exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/pages/guide/safe.md"
ROWS = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and not line.startswith("| ---")]
PROMISES = [row.strip("| ").split(" | ") for row in ROWS if row != "| promise | tests |"]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def functions(path: str) -> set[str]:
    """Names of the functions of a file."""
    return {node.name for node in ast.parse((ROOT / path).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def missing(tests: str) -> list[str]:
    """What a cell names and no file has."""
    return [f"{path}::{name}" for path, name in TEST.findall(tests) if name not in functions(path)]


def test_the_page_makes_promises() -> None:
    assert len(PROMISES) > 20


@pytest.mark.parametrize(("promise", "tests"), PROMISES, ids=[promise[:40] for promise, _ in PROMISES])
def test_a_promise_names_tests_that_exist(promise: str, tests: str) -> None:
    assert promise.endswith(".")
    assert TEST.sub("", tests).strip() == ""
    assert missing(tests) == []


def test_a_test_that_does_not_exist_is_found() -> None:
    assert missing("`tests/docs/test_safe.py::test_nothing`") == ["tests/docs/test_safe.py::test_nothing"]


def test_security_says_what_it_must() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert re.findall("^## (.*)", text, re.MULTILINE) == [
        "Supported versions",
        "How to report",
        "What counts",
        "What does not",
    ]
