"""Covering arrays: few cases in which every two values of two settings meet, in place of every combination."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]
"""two settings by name, each with the position of its value"""


def covering_array(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] | None = None) -> list[Case]:
    """Cases in which every pair of values that may meet does so once at least, the same ones at every call.

    Greedy (Cohen et al., "The AETG system", 1997): a case begins with a pair that none has yet, then takes of each
    setting the value that adds most new pairs, of equal ones any.

    Args:
        factors: settings and their values.
        allowed: whether the given settings may be combined; it must bear incomplete cases, and a case that is allowed
            so far must have an allowed value of every other setting.
    """
    may = allowed or (lambda case: True)
    names = list(factors)
    open_pairs: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
        if may({a: factors[a][i], b: factors[b][j]})
    }
    generator, cases = random.Random(0), []
    while open_pairs:
        chosen = _next_case(factors, open_pairs, may, generator)
        for pair in _pairs(names, chosen):
            open_pairs.pop(pair, None)
        cases.append({name: factors[name][chosen[name]] for name in names})
    return cases


def arguments(factors: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The array as arguments of `pytest.mark.parametrize`."""
    return [tuple(case.values()) for case in covering_array(factors)]


def _next_case(
    factors: Mapping[str, Sequence[Any]],
    open_pairs: Mapping[Pair, None],
    may: Callable[[Case], bool],
    generator: random.Random,
) -> dict[str, int]:
    """Positions of an allowed case's values, with the first open pair among them."""
    chosen = dict(next(iter(open_pairs)))
    for name in (n for n in factors if n not in chosen):
        so_far = {other: factors[other][i] for other, i in chosen.items()}
        values = [i for i, value in enumerate(factors[name]) if may({**so_far, name: value})]
        assert values, f"no value of {name} is allowed beside {so_far}"
        gains = [_gain(list(factors), chosen, name, i, open_pairs) + 0.9 * generator.random() for i in values]
        chosen[name] = values[gains.index(max(gains))]
    return chosen


def _gain(
    names: Sequence[str], chosen: Mapping[str, int], name: str, value: int, open_pairs: Mapping[Pair, None]
) -> int:
    """How many open pairs a value brings."""
    at = names.index(name)
    ordered = (((o, i), (name, value)) if names.index(o) < at else ((name, value), (o, i)) for o, i in chosen.items())
    return sum(pair in open_pairs for pair in ordered)


def _pairs(names: Sequence[str], chosen: Mapping[str, int]) -> list[Pair]:
    return [((a, chosen[a]), (b, chosen[b])) for a, b in combinations(names, 2)]
