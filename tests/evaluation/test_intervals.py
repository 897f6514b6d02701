import math
import random
import statistics

import pytest

from sse_convert.evaluation.intervals import Accuracy, ratio_standard_error, share_interval, wilson


@pytest.mark.parametrize(
    ("correct", "samples", "low", "high"),
    [  # values of R's prop.test(..., correct = FALSE), also in Newcombe 1998, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_against_published_values(correct, samples, low, high):
    assert wilson(correct, samples) == pytest.approx((low, high), abs=5e-5)


def test_wilson_solves_its_defining_equation():
    low, high = wilson(37, 200)
    for bound in (low, high):
        assert abs(37 / 200 - bound) / math.sqrt(bound * (1 - bound) / 200) == pytest.approx(1.959963984540054)


@pytest.mark.parametrize(("correct", "samples"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_counts_that_cannot_be(correct, samples):
    with pytest.raises(ValueError, match="is not a share"):
        wilson(correct, samples)


def test_accuracy_without_samples_has_no_interval():
    assert Accuracy(0, 0).to_dict()["accuracy"] is None
    assert math.isnan(Accuracy(0, 0).value)


def test_standard_error_of_equal_groups_is_the_textbook_one():
    rng = random.Random(0)
    means = [rng.gauss(3, 0.2) for _ in range(20)]
    assert ratio_standard_error([100 * m for m in means], [100] * 20) == pytest.approx(
        statistics.stdev(means) / math.sqrt(20)
    )


def test_standard_error_needs_two_groups():
    assert ratio_standard_error([5.0], [2]) is None
    assert ratio_standard_error([5.0, 0.0], [2, 0]) is None


def test_share_interval_of_two_perfect_scores_comes_from_one_bound():
    low, high = share_interval(50, 50, 50, 50)
    bound = wilson(50, 50)[0]
    assert low == pytest.approx(bound)
    assert high == pytest.approx(1 / bound)


def test_share_interval_holds_the_share_and_narrows_with_samples():
    for hits, of_hits in ((0, 30), (10, 30), (30, 30), (30, 10)):
        low, high = share_interval(hits, 40, of_hits, 40)
        assert 0 <= low <= hits / of_hits <= high
        narrow = share_interval(100 * hits, 4000, 100 * of_hits, 4000)
        assert narrow[1] - narrow[0] < high - low


def test_share_interval_covers():
    """95% intervals of a known ratio hold it in 95% of the draws or more."""
    rng = random.Random(0)
    inside = 0
    for _ in range(400):
        hits, of_hits = (sum(rng.random() < p for _ in range(100)) for p in (0.6, 0.9))
        low, high = share_interval(hits, 100, of_hits, 100)
        inside += low <= 0.6 / 0.9 <= high
    assert inside >= 0.93 * 400


def test_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match="share of nothing"):
        share_interval(1, 2, 0, 2)
