"""Covering arrays: every pair that may meet meets, in few cases."""

from itertools import combinations
from typing import Any

from tests.covering import covering_array

FACTORS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2), "e": (None, 5)}


def pairs(case: dict[str, Any]) -> set[Any]:
    return set(combinations(case.items(), 2))


def test_every_pair_meets_in_few_cases() -> None:
    cases = covering_array(FACTORS)
    wanted = {((a, x), (b, y)) for (a, xs), (b, ys) in combinations(FACTORS.items(), 2) for x in xs for y in ys}
    assert set().union(*map(pairs, cases)) == wanted
    assert 9 <= len(cases) <= 12


def test_what_may_not_meet_does_not_and_all_else_does() -> None:
    def allowed(case: dict[str, Any]) -> bool:
        return not (case.get("a") == 3 and case.get("b") == "y")

    cases = covering_array(FACTORS, allowed)
    assert all(map(allowed, cases))
    wanted = set().union(*map(pairs, covering_array(FACTORS))) - {(("a", 3), ("b", "y"))}
    assert set().union(*map(pairs, cases)) == wanted


def test_two_calls_give_the_same_cases() -> None:
    assert covering_array(FACTORS) == covering_array(FACTORS)
