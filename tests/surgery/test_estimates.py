"""The memory that `plan` estimates against every peak that was measured on a GPU."""

import pytest

from benchmarks.training.estimates import NEAR, rows

ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_estimate_is_near_what_was_measured(row):
    assert row.estimated == pytest.approx(row.measured, rel=NEAR)


def test_the_speed_of_stages_as_they_run_by_themselves_is_near_what_was_measured():
    """Short stages are not compiled, and are slower; GPU hours are those of long ones."""
    found = [row for row in ROWS if row.name.startswith("qwen3-") and not row.name.endswith("-eager")]
    assert {row.record["recipe"] for row in found} == {"qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"}
    for row in found:
        assert row.estimated_tokens_per_second == pytest.approx(row.tokens_per_second, rel=0.25), row.name


def test_shapes_and_losses_that_were_measured():
    assert {"kl", "ce"} <= {row.record["stage"]["loss"] for row in ROWS}
    assert len(ROWS) >= 3
    assert all(row.record["commit"] for row in ROWS)
