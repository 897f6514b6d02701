"""What a method answers, and how far methods agree."""

import dataclasses as dc
import itertools
import statistics
from collections.abc import Mapping, Sequence

from sse_convert.selection.measure import Measurement


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The layers that one method keeps."""

    method: str
    kept: tuple[int, ...]
    """ascending"""
    scores: Mapping[int, float]
    """layer -> how much the method wants it kept; empty for a method without scores"""
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


def best(method: str, scores: Mapping[int, float], keep: int) -> Choice:
    """The layers with the highest scores; of equal ones the earlier layer."""
    ranked = sorted(scores, key=lambda layer: (-scores[layer], layer))
    return Choice(method=method, kept=tuple(sorted(ranked[:keep])), scores=dict(scores))


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class MethodAgreement:
    """How alike two methods choose."""

    first: str
    second: str
    common: int
    """layers that both keep"""
    rank_correlation: float | None
    """Spearman's, over all layers; None where a method has no scores, or equal ones throughout"""


def agreements(choices: Sequence[Choice]) -> list[MethodAgreement]:
    """Every pair of choices."""
    return [
        MethodAgreement(
            first=a.method,
            second=b.method,
            common=len(set(a.kept) & set(b.kept)),
            rank_correlation=rank_correlation(a.scores, b.scores) if a.scores and b.scores else None,
        )
        for a, b in itertools.combinations(choices, 2)
    ]


def rank_correlation(a: Mapping[int, float], b: Mapping[int, float]) -> float | None:
    """Spearman's rank correlation of two scores of the same layers, equal scores sharing a mean rank."""
    ranks = [_ranks([scores[layer] for layer in sorted(a)]) for scores in (a, b)]
    if any(len(set(r)) == 1 for r in ranks):
        return None
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (values.count(value) + 1) / 2 for value in values]
