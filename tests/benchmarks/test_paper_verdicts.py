"""Outcomes of made-up figures."""

import pytest

from benchmarks.paper.verdicts import Difference, combine, judge, loss_difference, seed_doubt, share_difference


def apart(by, doubt=0.1):
    return Difference(better="a", worse="b", by=by, doubt=doubt)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ahead", "not_behind", "outcome"),
    [
        ([0.2], [], "holds"),
        ([0.2, 0.2], [-0.05], "holds"),
        ([0.2, 0.05], [], "undecided"),
        ([0.05], [0.2], "undecided"),
        ([-0.2], [], "fails"),
        ([-0.2, 0.05], [-0.2], "fails"),
        ([-0.2, 0.2], [], "mixed"),
        ([0.2], [-0.2], "mixed"),
        ([0.05], [-0.2], "mixed"),
    ],
)
def test_outcomes_of_differences(ahead, not_behind, outcome):
    assert judge([apart(by) for by in ahead], [apart(by) for by in not_behind]) == outcome


def test_what_was_not_measured_decides_nothing():
    missing = Difference(better="a", worse="b")
    assert judge([apart(0.2), missing]) == "undecided"
    assert judge([apart(0.2, None)]) == "undecided"
    assert share_difference({"a": [0.5]}, 10, "a", "b") == missing
    assert loss_difference({"b": [0.5]}, "a", "b") == missing


@pytest.mark.parametrize(
    ("outcomes", "together"),
    [
        (["holds", "undecided"], "holds"),
        (["fails", "undecided"], "fails"),
        (["holds", "fails"], "mixed"),
        (["undecided"], "undecided"),
    ],
)
def test_outcomes_of_several_measurements(outcomes, together):
    assert combine(outcomes) == together


def test_two_variants_give_the_paired_interval():
    """Student's t of the differences by seed: 0.1, 0.2, 0.3, of standard deviation 0.1."""
    figures = {"a": [0.5, 0.8, 0.6], "b": [0.4, 0.6, 0.3]}
    assert seed_doubt(figures) == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_what_a_seed_does_to_all_variants_is_no_doubt():
    figures = {"a": [0.1, 0.6, 0.3], "b": [0.2, 0.7, 0.4], "c": [0.3, 0.8, 0.5]}
    assert seed_doubt(figures) == pytest.approx(0)
    found = loss_difference(figures, "a", "c", text_doubt=0.05)
    assert (found.by, found.doubt) == (pytest.approx(0.2), pytest.approx(0.05))


def test_one_seed_leaves_everything_open():
    assert seed_doubt({"a": [0.1], "b": [0.9]}) is None
    found = share_difference({"a": [0.1], "b": [0.9]}, 100, "b", "a")
    assert not found.ahead
    assert found.by == pytest.approx(0.8)


def test_shares_are_in_doubt_by_their_samples_too():
    figures = {"a": [0.6, 0.6], "b": [0.4, 0.4]}
    assert not share_difference(figures, 20, "a", "b").ahead
    assert share_difference(figures, 500, "a", "b").ahead
    assert share_difference(figures, 500, "b", "a").behind
