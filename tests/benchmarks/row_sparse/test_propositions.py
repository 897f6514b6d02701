"""Appendix A in numbers: what must hold never breaks, what is only tacitly assumed does break without it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper.row_sparse import propositions
from benchmarks.paper.row_sparse.propositions import (
    DIMS,
    STATEMENTS,
    Check,
    attention_field,
    check_all,
    cone,
    cosine,
    unit,
)
from sse_convert.errors import UsageError


@pytest.mark.parametrize(("number", "statement", "expected", "sampler"), STATEMENTS, ids=[s[1] for s in STATEMENTS])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_statement(number, statement, expected, sampler, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    margins = torch.cat([sampler(2000, dim, generator) for dim in DIMS])
    assert margins.isfinite().all()
    assert bool((margins >= -propositions.ROUNDING).all()) == expected


@pytest.mark.smoke
def test_all_four_propositions_are_checked() -> None:
    checks = check_all(500)
    assert {check.proposition for check in checks} == {1, 2, 3, 4}
    assert all(check.confirmed for check in checks)
    assert all((check.violations == 0) == check.expected for check in checks)
    assert check_all(500) == checks
    assert check_all(500, seed=1) != checks


def test_confirmed_needs_instances_and_the_expected_answer() -> None:
    assert Check(1, "", True, 10, 0, 0.1).confirmed
    assert not Check(1, "", True, 10, 1, -0.1).confirmed
    assert Check(1, "", False, 10, 1, -0.1).confirmed
    assert not Check(1, "", False, 10, 0, 0.1).confirmed
    assert not Check(1, "", True, 0, 0, math.nan).confirmed


def test_no_instances_are_refused() -> None:
    with pytest.raises(UsageError, match="0 instances"):
        check_all(0)


def test_cones_are_as_wide_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    axis = unit(torch.randn(5000, 3, dtype=torch.float64, generator=generator))
    angle = torch.full((5000,), 0.7, dtype=torch.float64)
    x = cone(axis, angle, generator)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(5000, dtype=torch.float64))
    reached = cosine(x, axis).clamp(-1, 1).acos()
    assert reached.max() <= 0.7 + 1e-9
    assert reached.max() > 0.69


def test_attention_field_by_hand() -> None:
    """One channel that halves: p_ts = 2^-(t - s), so three tokens back are worth 1/8."""
    decay = torch.full((1, 10, 1), 0.5, dtype=torch.float64)
    for threshold, field in ((1 / 8, 3), (0.13, 2), (0.6, 0), (1e-9, 9)):
        assert attention_field(decay, torch.tensor([threshold])).item() == field
    decay[0, 9] = 1.0
    assert attention_field(decay, torch.tensor([1 / 8])).item() == 4


def test_counterexample_to_the_second_proposition_as_stated() -> None:
    """Rows that hold mostly the other class: dense rows are less alike than row-sparse ones.

    Row 1 weighs class 1 by 0.1 and class 2 by 1, row 2 the other way round; every weight is positive and inputs of
    different classes are further apart (cos <= 0.1) than inputs of one class (cos >= 0.9).
    """
    x = {(1, 1): (0.4, 1.0, 0.1), (2, 1): (-0.2, 1.0, 0.0), (1, 2): (0.5, -0.05, 1.0), (2, 2): (0.5, 0.3, 1.0)}
    v = {key: unit(torch.tensor(value, dtype=torch.float64)) for key, value in x.items()}
    same = min(cosine(v[1, 1], v[2, 1]), cosine(v[1, 2], v[2, 2])).item()
    other = max(cosine(v[1, 1], v[2, 2]), cosine(v[2, 1], v[1, 2])).item()
    assert other < same
    dense = cosine(0.1 * v[1, 1] + v[1, 2], v[2, 1] + 0.1 * v[2, 2]).item()
    assert dense < cosine(v[1, 1], v[2, 2]).item()
