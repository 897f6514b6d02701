"""What a choice of layers answers."""

import dataclasses as dc
import itertools
from collections.abc import Mapping

from sse_convert.selection.measure import Measurement


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The layers that stay."""

    method: str
    kept: tuple[int, ...]
    """ascending"""
    scores: Mapping[int, float]
    """layer -> how much the method wants it kept"""
    span: int = 1
    """1 where layers are kept, else the factor in the numbers of heads"""
    tokens: int = 0
    """tokens the model read for this choice alone"""
    seconds: float = 0.0
    """time of that"""
    measured: Measurement | None = None
    """the model with these layers kept and all others replaced"""

    @property
    def longest_run(self) -> int | None:
        """Most replaced layers in a row; unknown without kept layers, and of heads."""
        if not self.kept or self.span > 1:
            return None
        return max(b - a - 1 for a, b in itertools.pairwise((-1, *self.kept)))
