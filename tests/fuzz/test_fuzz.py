"""Bad input of every class, made by generators with fixed seeds: accepted and right, or a clear error with its code."""

import json
from pathlib import Path

import pytest

from tests.fuzz import places
from tests.fuzz.campaign import campaign
from tests.fuzz.classes import CLASSES

LONG_RUN = Path(__file__).resolve().parents[2] / "tools" / "fuzz.json"
CASES = 80
"""of a class; `python tools/fuzz.py` tries 2,000 by hand"""
FEWER = dict.fromkeys(("converted", "weights", "tokenizer", "paths", "answers", "keys"), 20)
FEWER |= dict.fromkeys(("yaml", "overrides", "recipe", "arguments", "prompts"), 40)
"""of classes that load a model in many cases, or recipes"""
SEED = 20260


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    places.build(folder)
    return folder


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_accepted_and_right_or_a_clear_error(root, kind):
    cases = FEWER.get(kind.name, CASES)
    tally = campaign(kind, root, cases, SEED)
    assert tally.faults == []
    assert tally.cases >= cases
    assert tally.accepted or kind.name == "prompts"  # of which one in some hundreds is right
    assert tally.refused


def test_the_long_run_found_nothing():
    found = json.loads(LONG_RUN.read_text("utf-8"))
    assert found.keys() <= {kind.name for kind in CLASSES}
    for name, entry in found.items():
        assert entry["cases"] == entry["accepted"] + sum(entry["refused"].values()) >= 2000, name
        assert entry["faults"] == 0, name
