"""Bad input of every class, made by generators with fixed seeds: accepted and right, or a clear error with its code."""

import pytest

from tests.fuzz import places
from tests.fuzz.campaign import campaign
from tests.fuzz.classes import CLASSES

CASES = 200
SEED = 20260


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    places.build(folder)
    return folder


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_accepted_and_right_or_a_clear_error(root, kind):
    tally = campaign(kind, root, CASES, SEED)
    assert tally.faults == []
    assert tally.cases >= CASES
    assert tally.accepted >= CASES // 50
    assert tally.refused
