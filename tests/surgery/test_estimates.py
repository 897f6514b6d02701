"""The memory that `plan` estimates against every peak that was measured on a GPU."""

import pytest

from benchmarks.training.estimates import NEAR, rows

ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_estimate_is_near_what_was_measured(row):
    assert row.estimated == pytest.approx(row.measured, rel=NEAR)


def test_the_speed_of_another_shape_is_near_what_was_measured():
    found = [row for row in ROWS if row.record["recipe"] == "qwen3-8b"]
    assert found
    for row in found:
        assert row.estimated_tokens_per_second == pytest.approx(row.tokens_per_second, rel=0.25)


def test_shapes_and_losses_that_were_measured():
    assert {"kl", "ce"} <= {row.record["stage"]["loss"] for row in ROWS}
    assert len(ROWS) >= 3
    assert all(row.record["commit"] for row in ROWS)
