"""Many cases of a class, with a fixed seed; `tests/fuzz/test_fuzz.py` runs some, `tools/fuzz.py` more."""

import dataclasses as dc
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

from tests.fuzz.classes import FuzzClass
from tests.fuzz.outcome import Outcome


@dc.dataclass
class Tally:
    """What came of the cases of a class."""

    cases: int = 0
    accepted: int = 0
    refused: Counter[int] = dc.field(default_factory=Counter)
    """by exit code"""
    faults: list[tuple[str, str]] = dc.field(default_factory=list)
    """reason and case of each"""

    def add(self, case: Any, outcome: Outcome) -> None:
        """Count one case."""
        self.cases += 1
        if outcome.fault is not None:
            self.faults.append((outcome.fault, repr(case)[:2000]))
        elif outcome.code == 0:
            self.accepted += 1
        else:
            self.refused[outcome.code] += 1


def campaign(kind: FuzzClass, root: Path, count: int, seed: int) -> Tally:
    """Run cases of a class.

    Args:
        kind: the class.
        root: folder that `places.build` filled.
        count: cases.
        seed: of their making; equal seeds give equal cases with equal versions of hypothesis.
    """
    tally = Tally()

    @with_seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases(root))
    def one(case: Any) -> None:
        tally.add(case, kind.run(root, case))

    one()
    return tally
