"""The list of faults fits the code: each can be seeded, and its tests exist (tools/seed_faults.py seeds them)."""

import ast
from pathlib import Path

import pytest
import yaml

from tools.seed_faults import FAULTS, ROOT, Fault, faults, seeded


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{Path(fault['file']).stem}: {fault['new'].strip()}")
def test_the_fault_can_be_seeded(fault: Fault) -> None:
    ast.parse(seeded((ROOT / fault["file"]).read_text(encoding="utf-8"), fault))
    for selected in fault["tests"]:
        path, _, name = selected.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8")


def test_a_fault_that_does_not_fit_is_an_error() -> None:
    fault = {"file": "x.py", "old": "a", "new": "b", "tests": []}
    with pytest.raises(ValueError, match="holds 2 times"):
        seeded("a a", fault)


def test_no_fault_stands_twice() -> None:
    listed = [(f["file"], f["new"]) for f in yaml.safe_load(FAULTS.read_text(encoding="utf-8"))]
    assert len(set(listed)) == len(listed)
