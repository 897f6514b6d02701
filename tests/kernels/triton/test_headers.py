"""Every kernel says what it computes as an equation, its grid, its bytes and why its tiles; no signature is endless."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sse_convert

PACKAGE = Path(sse_convert.__file__).parent
MOST_PARAMETERS = 40
GRID = re.compile(r"Grid \(([^)]+)\)")
SAID = {
    "its equation": re.compile(r"\S (=|<-) \S"),
    "Grid (programs along each axis)": GRID,
    "Bytes of what, each with its size:": re.compile(r"Bytes of [^.:]+: .*\d"),
    "Tiles: and why": re.compile(r"Tiles: \S"),
}
"""what the docstring of a kernel holds, the equation perhaps that of its file"""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def kernels() -> dict[str, tuple[ast.FunctionDef, str]]:
    """Each kernel by name, with the header of its file."""
    trees = [ast.parse(file.read_text()) for file in (PACKAGE / "kernels" / "triton").rglob("*.py")]
    return {
        f.name: (f, ast.get_docstring(tree) or "")
        for tree in trees
        for f in functions(tree)
        if f.name.endswith("_kernel") and any("jit" in ast.unparse(mark) for mark in f.decorator_list)
    }


KERNELS = kernels()


def lacking(kernel: str, header: str) -> list[str]:
    """What a kernel's docstring does not say."""
    docstring = " ".join(kernel.split())
    return [
        what
        for what, form in SAID.items()
        if not form.search(f"{header} {docstring}" if what == "its equation" else docstring)
    ]


def axes(kernel: ast.FunctionDef) -> set[int]:
    """Axes of the grid that a kernel reads its place from."""
    found = re.findall(r"tl\.program_id\((\d)\)", ast.unparse(kernel))
    return {int(axis) for axis in found}


def test_no_signature_is_endless() -> None:
    long = [
        f.name
        for file in PACKAGE.rglob("*.py")
        for f in functions(ast.parse(file.read_text()))
        if len([*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]) > MOST_PARAMETERS
    ]
    assert not long


def test_every_kernel_says_equation_grid_bytes_and_tiles() -> None:
    assert len(KERNELS) > 20
    silent = {name: missing for name, (f, header) in KERNELS.items()
              if (missing := lacking(ast.get_docstring(f) or "", header))}  # fmt: skip
    assert not silent


def test_the_grid_that_is_told_has_the_axes_that_are_read() -> None:
    for name, (f, _) in KERNELS.items():
        told = GRID.search(" ".join((ast.get_docstring(f) or "").split()))
        assert told is not None, name
        assert axes(f) == set(range(len(told[1].split(",")))), f"{name}: Grid ({told[1]})"


@pytest.mark.parametrize(
    ("docstring", "missing"),
    [
        ("o = x. Grid (rows). Bytes of a row: 4 D. Tiles: a row, read once.", []),
        ("o is x. Grid (rows). Bytes of a row: 4 D. Tiles: a row, read once.", ["its equation"]),
        ("o = x. Bytes of a row: some. Tiles:", [what for what in SAID if what != "its equation"]),
    ],
)
def test_what_is_missing_is_noticed(docstring: str, missing: list[str]) -> None:
    assert lacking(docstring, "") == missing
