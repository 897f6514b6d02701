"""Uncertainty of measured figures: Wilson intervals for accuracies, standard errors of means over windows."""

import dataclasses as dc
import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""two-sided 95% quantile of the normal distribution"""


@dc.dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of hits with its 95% Wilson interval."""

    correct: float
    """hits; a try may count in part"""
    samples: int
    """tries"""

    @property
    def value(self) -> float:
        """The share of hits, NaN without samples."""
        return self.correct / self.samples if self.samples else math.nan

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON-ready: samples, correct, accuracy, low, high (the last three None without samples)."""
        if not self.samples:
            return {"samples": 0, "correct": 0, "accuracy": None, "low": None, "high": None}
        low, high = wilson(self.correct, self.samples)
        return {
            "samples": self.samples,
            "correct": self.correct,
            "accuracy": self.value,
            "low": low,
            "high": high,
        }


def wilson(correct: float, samples: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a share.

    For tries that count in part it is too wide rather than too narrow: their variance is at most that of hits.

    Args:
        correct: hits, 0 to `samples`.
        samples: tries, at least 1.
        z: normal quantile, 95% by default.

    Raises:
        ValueError: counts that cannot be.

    Source: E. B. Wilson, 1927, Journal of the American Statistical Association 22, 209-212.
    """
    if samples < 1 or not 0 <= correct <= samples:
        raise ValueError(f"{correct} of {samples} is not a share, expected 0 <= correct <= samples and samples >= 1")
    share = correct / samples
    centre = share + z * z / (2 * samples)
    spread = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples))
    scale = 1 + z * z / samples
    low = 0.0 if correct == 0 else (centre - spread) / scale
    high = 1.0 if correct == samples else (centre + spread) / scale
    return low, high


def ratio_standard_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Standard error of sum(sums) / sum(counts) over independent groups (windows) of possibly unequal size.

    The linearised ratio estimator; for equal counts it is the standard deviation of the group means over sqrt(groups).

    Returns:
        The standard error, or None with fewer than two groups that count.
    """
    groups = [(s, c) for s, c in zip(sums, counts, strict=True) if c]
    if len(groups) < 2:
        return None
    total = sum(c for _, c in groups)
    mean = sum(s for s, _ in groups) / total
    squares = sum((s - mean * c) ** 2 for s, c in groups)
    return math.sqrt(len(groups) / (len(groups) - 1) * squares) / total


def share_interval(correct: float, samples: int, of_correct: float, of_samples: int) -> tuple[float, float]:
    """A 95% interval of the ratio of two shares, (correct / samples) / (of_correct / of_samples).

    Built from the Wilson intervals of both (method of variance estimates recovery). The shares are taken as
    independent; on the same samples they go together, which makes the interval too wide rather than too narrow.

    Args:
        correct: hits of the first, 0 to `samples`.
        samples: tries of the first, at least 1.
        of_correct: hits of the second, at least 1.
        of_samples: tries of the second.

    Raises:
        ValueError: counts that cannot be.

    Source: A. Donner and G. Y. Zou, 2012, Statistical Methods in Medical Research 21, 347-359.
    """
    if of_correct < 1:
        raise ValueError(f"{of_correct} hits: a share of nothing is not defined")
    (low, high), (of_low, of_high) = wilson(correct, samples), wilson(of_correct, of_samples)
    product = correct / samples * of_correct / of_samples

    def end(a: float, b: float, sign: int) -> float:
        x, y = a * (2 * correct / samples - a), b * (2 * of_correct / of_samples - b)
        return (product + sign * math.sqrt(max(0.0, product * product - x * y))) / y

    return max(0.0, end(low, of_high, -1)), end(high, of_low, 1)
