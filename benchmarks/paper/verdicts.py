"""Whether figures bear out the order that a claim predicts: differences of variants, their intervals, an outcome."""

import dataclasses as dc
import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.paper.row_sparse.results import STUDENT, Outcome
from sse_convert.evaluation.intervals import Z95, Accuracy, newcombe

BySeed = Mapping[str, Sequence[float]]
"""figures of each variant, one per seed, the same seeds for all"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two variants of which the claim says that one is better, or not worse."""

    better: str
    """the one that should be better"""
    worse: str
    """the other"""
    by: float | None = None
    """how much better it is, in the mean over seeds; None where one of them was not measured"""
    doubt: float | None = None
    """half width of the 95% interval of `by`; None with one seed"""

    @property
    def ahead(self) -> bool:
        """Better beyond doubt."""
        return self.by is not None and self.doubt is not None and self.by > self.doubt

    @property
    def behind(self) -> bool:
        """Worse beyond doubt."""
        return self.by is not None and self.doubt is not None and self.by < -self.doubt


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def seed_doubt(figures: BySeed) -> float | None:
    """Half width of the 95% interval that seeds leave to a difference of two variants' means; None with one seed.

    Student's t on what is left of the figures when each variant's mean and each seed's are taken off: a seed fixes the
    order of the training rows, which moves all variants alike, and all count towards the spread, since two variants
    with two seeds say little about it.

    Args:
        figures: of at least two variants, with the same seeds.
    """
    table = list(figures.values())
    variants, seeds = len(table), len(table[0])
    degrees = (variants - 1) * (seeds - 1)
    if degrees < 1:
        return None
    by_seed = [mean(column) for column in zip(*table, strict=True)]
    everything = mean(by_seed)
    left = [x - mean(row) - by_seed[i] + everything for row in table for i, x in enumerate(row)]
    quantile = STUDENT[degrees] if degrees < len(STUDENT) else Z95
    return quantile * math.sqrt(2 / seeds * sum(x * x for x in left) / degrees)


def share_difference(figures: BySeed, samples: int, better: str, worse: str) -> Difference:
    """Of shares of the same samples by all seeds. The interval covers the seeds and the choice of the samples.

    Args:
        figures: shares, 0 to 1.
        samples: how many each share is of. All are taken as independent, which makes the interval too wide.
        better: name of a variant.
        worse: of another.
    """
    if better not in figures or worse not in figures:
        return Difference(better=better, worse=worse)
    first, second = (mean(figures[name]) for name in (better, worse))
    low, high = newcombe(Accuracy(first * samples, samples), Accuracy(second * samples, samples))
    by, seeds = first - second, seed_doubt(figures)
    doubt = None if seeds is None else math.hypot(seeds, max(by - low, high - by))
    return Difference(better=better, worse=worse, by=by, doubt=doubt)


def loss_difference(figures: BySeed, better: str, worse: str, *, text_doubt: float = 0.0) -> Difference:
    """Of losses on the same text, in nats per token. The interval covers the seeds, and the text as far as known.

    Args:
        figures: losses; less is better.
        better: name of a variant.
        worse: of another.
        text_doubt: half width of the 95% interval that the choice of the text leaves open.
    """
    if better not in figures or worse not in figures:
        return Difference(better=better, worse=worse)
    seeds = seed_doubt(figures)
    doubt = None if seeds is None else math.hypot(seeds, text_doubt)
    return Difference(better=better, worse=worse, by=mean(figures[worse]) - mean(figures[better]), doubt=doubt)


def judge(ahead: Sequence[Difference], not_behind: Sequence[Difference] = ()) -> Outcome:
    """What differences say of a claim.

    Args:
        ahead: the claim says that each of these is above 0.
        not_behind: and that none of these is below 0.

    Returns:
        holds: all of the first are above 0 beyond doubt, and none of the second is below. fails: of the first, some are
        below and none above. mixed: some are above and some below, or only one of the second is below. undecided: the
        rest.
    """
    above, below = any(d.ahead for d in ahead), any(d.behind for d in ahead)
    if below and not above:
        return "fails"
    if below or any(d.behind for d in not_behind):
        return "mixed"
    return "holds" if all(d.ahead for d in ahead) else "undecided"


def combine(outcomes: Iterable[Outcome]) -> Outcome:
    """One outcome for several measurements of a claim: undecided ones count for nothing beside decided ones."""
    decided = set(outcomes) - {"undecided"}
    if len(decided) > 1:
        return "mixed"
    return decided.pop() if decided else "undecided"
