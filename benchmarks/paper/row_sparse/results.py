"""What the recall experiment measured, and whether it bears out the paper's claims.

Shape letters beside those of the package: N examples.
"""

import dataclasses as dc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from benchmarks.paper.row_sparse.model import ModelSettings
from benchmarks.paper.row_sparse.recall import Questions, Run
from sse_convert.evaluation.intervals import Z95, ratio_standard_error

STUDENT = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262,
    2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
"""two-sided 95% quantiles of Student's t by degrees of freedom; beyond them the normal one serves"""
FAR = 0.5
"""queries at least this share of a row's length behind their key are far"""
_MEASURED = ("accuracy", "far")
Outcome = Literal["holds", "mixed", "undecided", "fails"]


@dc.dataclass(frozen=True, slots=True)
class Measured:
    """Accuracy of the models that differ in their seeds alone."""

    by_seed: tuple[float, ...]
    """one per seed"""
    sampling_error: float
    """standard error of their mean from the choice of the test examples"""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.by_seed) / len(self.by_seed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"mean": self.mean, "by_seed": list(self.by_seed), "sampling_error": self.sampling_error}


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the figure, at the learning rate that did best on validation rows."""

    mixer: str
    """token mixer"""
    noise: bool
    """setting 2, else setting 1"""
    width: int
    """model dimension"""
    state_size: int
    """numbers in the state of a sequence"""
    rows: int | None
    """k, rows of a head's state that a token updates; None for all"""
    learning_rate: float
    """the best"""
    validation: dict[float, float]
    """mean accuracy over seeds by learning rate"""
    accuracy: Measured
    """all test queries"""
    far: Measured
    """test queries far behind their key"""

    @property
    def curve(self) -> tuple[str, bool]:
        """What a panel of the figure shows."""
        return self.mixer, self.noise

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        own = {f.name: getattr(self, f.name) for f in dc.fields(self)}
        return {**own, "accuracy": self.accuracy.to_dict(), "far": self.far.to_dict()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Cell":
        """The cell that `to_dict` wrote, from JSON."""
        measured = {name: Measured(tuple(data[name]["by_seed"]), data[name]["sampling_error"]) for name in _MEASURED}
        return Cell(**{**data, **measured, "validation": {float(k): v for k, v in data["validation"].items()}})


@dc.dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the paper on one panel of the figure."""

    claim: str
    """what the paper says"""
    mixer: str
    """token mixer"""
    noise: bool
    """setting 2, else setting 1"""
    outcome: Outcome
    """what the data say"""
    differences: tuple[tuple[float, float], ...]
    """the differences that were judged, by width, each with the half width of its 95% interval"""
    ahead: int
    """pairs of models with the same seed that differ as claimed, beyond the choice of the test examples"""
    behind: int
    """pairs that differ the other way"""
    pairs: int
    """pairs of models"""


def score(
    settings: ModelSettings,
    runs: Sequence[Run],
    validation_RNK: Tensor,
    test_RNK: Tensor,
    test: Questions,
) -> list[Cell]:
    """Cells of models that were trained together.

    Args:
        settings: their shape.
        runs: one per model.
        validation_RNK: right answers to the questions that choose the learning rate.
        test_RNK: right answers to the test questions.
        test: the test questions.
    """
    groups: dict[tuple[bool, int | None], dict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, run in enumerate(runs):
        groups[run.noise, run.update.rows if run.update else None][run.learning_rate].append(i)
    cells = []
    far_NK = test.distances_NK >= FAR * test.inputs_SNT.shape[-1]
    for (noise, rows), by_rate in groups.items():
        validation = {rate: validation_RNK[own].double().mean().item() for rate, own in by_rate.items()}
        best = max(validation, key=lambda rate: validation[rate])
        correct = test_RNK[by_rate[best]]
        cells.append(
            Cell(
                mixer=settings.mixer,
                noise=noise,
                width=settings.width,
                state_size=settings.state_size,
                rows=rows,
                learning_rate=best,
                validation=validation,
                accuracy=_measured(correct, far_NK | ~far_NK),
                far=_measured(correct, far_NK),
            )
        )
    return cells


def claims(cells: Iterable[Cell]) -> list[Claim]:
    """The caption's three sentences, for every mixer and setting that has both dense and row-sparse cells.

    That about growth only where there are several widths.
    """
    panels: dict[tuple[str, bool], list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell.width):
        panels[cell.curve].append(cell)
    found = []
    for (mixer, noise), panel in panels.items():
        dense, sparse = ([c for c in panel if (c.rows is None) == is_dense] for is_dense in (True, False))
        better = [(s.accuracy, d.accuracy) for s, d in zip(sparse, dense, strict=True)]
        further = [(s.far, d.far) for s, d in zip(sparse, dense, strict=True)]
        found += [
            _claim("row-sparse beats dense", mixer, noise, better, _ahead),
            _claim("longer effective context", mixer, noise, further, _ahead),
        ]
        if len(sparse) > 1:
            growth = [(b.accuracy, a.accuracy) for a, b in pairwise([*sparse, sparse[0]])]
            growth[-1] = growth[-1][::-1]  # from the narrowest to the widest
            found.append(_claim("row-sparse grows with state size", mixer, noise, growth, _grows))
    return found


def difference(a: Measured, b: Measured) -> tuple[float, float]:
    """Mean of a - b over the seeds they share, and the half width of its 95% interval.

    The interval covers the choice of the test examples and, from two seeds on, that of the seeds (Student's t).
    """
    apart = [x - y for x, y in zip(a.by_seed, b.by_seed, strict=True)]
    mean, n = sum(apart) / len(apart), len(apart)
    over_seeds = 0.0
    if n > 1:
        quantile = STUDENT[n - 1] if n <= len(STUDENT) else Z95
        over_seeds = quantile * math.sqrt(sum((x - mean) ** 2 for x in apart) / (n * (n - 1)))
    return mean, math.hypot(over_seeds, Z95 * a.sampling_error, Z95 * b.sampling_error)


def _claim(
    claim: str,
    mixer: str,
    noise: bool,
    compared: Sequence[tuple[Measured, Measured]],
    judge: Callable[[Sequence[tuple[float, float]]], Outcome],
) -> Claim:
    differences = tuple(difference(a, b) for a, b in compared)
    pairs = [
        (x - y) / max(Z95 * math.hypot(a.sampling_error, b.sampling_error), 1e-12)
        for a, b in compared
        for x, y in zip(a.by_seed, b.by_seed, strict=True)
    ]
    ahead, behind = sum(x > 1 for x in pairs), sum(x < -1 for x in pairs)
    return Claim(claim, mixer, noise, judge(differences), differences, ahead, behind, len(pairs))


def _measured(correct_RNK: Tensor, counted_NK: Tensor) -> Measured:
    """Accuracy over the counted questions; NaN if there is none."""
    hits_RN, counts_N = (correct_RNK & counted_NK).double().sum(-1), counted_NK.sum(-1)
    total = int(counts_N.sum())
    error = ratio_standard_error(hits_RN.mean(0).tolist(), counts_N.tolist())
    by_seed = [hits / total if total else math.nan for hits in hits_RN.sum(-1).tolist()]
    return Measured(tuple(by_seed), math.nan if error is None else error)


def _ahead(differences: Sequence[tuple[float, float]]) -> Outcome:
    """Ahead somewhere and behind nowhere, both beyond doubt: the claim holds."""
    ahead = any(value > doubt for value, doubt in differences)
    behind = any(value < -doubt for value, doubt in differences)
    if ahead and behind:
        return "mixed"
    return "holds" if ahead else "fails" if behind else "undecided"


def _grows(differences: Sequence[tuple[float, float]]) -> Outcome:
    """From the narrowest to the widest model (last) up beyond doubt, and from none to the next down beyond doubt."""
    overall = _ahead(differences[-1:])
    falls = any(value < -doubt for value, doubt in differences)
    return "mixed" if falls and overall != "fails" else overall
