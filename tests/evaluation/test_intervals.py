import math
import random
import statistics

import pytest

from sse_convert.evaluation.intervals import Accuracy, ratio_standard_error, wilson


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
