"""From right and wrong answers to verdicts."""

import math

import pytest
import torch

from benchmarks.paper.row_sparse.figure import draw
from benchmarks.paper.row_sparse.model import ModelSettings
from benchmarks.paper.row_sparse.mqar import MQAR
from benchmarks.paper.row_sparse.recall import Questions, Run
from benchmarks.paper.row_sparse.results import Cell, Measured, claims, difference, score
from benchmarks.paper.row_sparse.update import RowSparse

N = 400


def cell(
    width: int, rows: int | None, by_seed: tuple[float, ...], error: float = 0.01, far: float | None = None
) -> Cell:
    far_seeds = by_seed if far is None else tuple(far for _ in by_seed)
    return Cell(
        mixer="gla", noise=False, width=width, state_size=width**2, rows=rows, learning_rate=0.01,
        validation={0.01: 0.5}, accuracy=Measured(by_seed, error), far=Measured(far_seeds, error),
    )  # fmt: skip


def outcomes(*cells: Cell) -> dict[str, str]:
    return {c.claim: c.outcome for c in claims(cells)}


def test_a_difference_has_the_doubt_of_seeds_and_of_examples() -> None:
    value, doubt = difference(Measured((0.9, 0.7), 0.03), Measured((0.5, 0.5), 0.04))
    assert value == pytest.approx(0.3)
    assert doubt == pytest.approx(math.hypot(12.706 * 0.1, 1.96 * 0.05), rel=1e-4)
    assert difference(Measured((0.9,), 0.0), Measured((0.5,), 0.1))[1] == pytest.approx(0.196, rel=1e-4)
    many = Measured(tuple(0.5 + 0.1 * (i % 2) for i in range(22)), 0.0)
    assert difference(many, Measured((0.5,) * 22, 0.0))[1] == pytest.approx(1.96 * 0.05 / math.sqrt(21), rel=1e-4)


def test_pairs_of_models_are_counted() -> None:
    cells = [cell(32, None, (0.5, 0.5, 0.5, 0.5)), cell(32, 8, (0.9, 0.4, 0.51, 0.6))]
    claim = claims(cells)[0]
    assert (claim.ahead, claim.behind, claim.pairs) == (2, 1, 4)
    assert claim.outcome == "undecided"


def test_claims_hold_where_everything_is_as_the_paper_says() -> None:
    found = outcomes(
        cell(32, None, (0.3, 0.3)), cell(32, 4, (0.5, 0.5)), cell(64, None, (0.5, 0.5)), cell(64, 8, (0.8, 0.8))
    )
    assert found == {
        "row-sparse beats dense": "holds",
        "longer effective context": "holds",
        "row-sparse grows with state size": "holds",
    }


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sparse", "dense", "outcome"),
    [
        ((0.5, 0.8), (0.5, 0.5), "holds"),
        ((0.5, 0.5), (0.5, 0.52), "undecided"),
        ((0.5, 0.5), (0.5, 0.8), "fails"),
        ((0.8, 0.5), (0.5, 0.8), "mixed"),
    ],
)
def test_ahead(sparse: tuple[float, float], dense: tuple[float, float], outcome: str) -> None:
    cells = [cell(w, None, (a, a)) for w, a in zip((32, 64), dense, strict=True)]
    cells += [cell(w, 8, (a, a)) for w, a in zip((32, 64), sparse, strict=True)]
    assert outcomes(*cells)["row-sparse beats dense"] == outcome


@pytest.mark.parametrize(
    ("by_width", "outcome"),
    [
        ((0.4, 0.6, 0.8), "holds"),
        ((0.4, 0.39, 0.8), "holds"),
        ((0.4, 0.9, 0.8), "mixed"),
        ((0.4, 0.41, 0.4), "undecided"),
        ((0.8, 0.6, 0.4), "fails"),
        ((0.4, 0.9, 0.4), "mixed"),
    ],
)
def test_growth(by_width: tuple[float, ...], outcome: str) -> None:
    widths = (128, 32, 64)
    by_width = (by_width[2], by_width[0], by_width[1])
    cells = [cell(w, rows, (a, a)) for w, a in zip(widths, by_width, strict=True) for rows in (None, 8)]
    assert outcomes(*cells)["row-sparse grows with state size"] == outcome


def test_the_context_claim_looks_at_far_queries() -> None:
    found = outcomes(cell(32, None, (0.9, 0.9), far=0.2), cell(32, 4, (0.5, 0.5), far=0.6))
    assert found["row-sparse beats dense"] == "fails"
    assert found["longer effective context"] == "holds"


@pytest.fixture(scope="module")
def test_questions() -> Questions:
    return Questions.draw(MQAR(length=16, pairs=2, vocab_size=20), N, 5, torch.device("cpu"))


def test_scores_are_those_of_the_rate_that_validation_chose(test_questions: Questions) -> None:
    runs = [
        Run(noise=False, update=update, learning_rate=rate, seed=seed)
        for update in (None, RowSparse(rows=2))
        for rate in (1e-3, 1e-2)
        for seed in (0, 1)
    ]
    validation, test = torch.zeros(8, N, 2, dtype=torch.bool), torch.zeros(8, N, 2, dtype=torch.bool)
    validation[2:4, :, 0] = True  # dense: the second rate is better in validation
    validation[4:6] = True  # row-sparse: the first one
    test[0:2] = True
    test[2, : N // 2], test[3] = True, True
    test[4:6, :, 1] = True
    dense, sparse = score(ModelSettings(mixer="gla", width=16, vocab_size=20), runs, validation, test, test_questions)
    assert (dense.rows, dense.learning_rate, dense.validation) == (None, 1e-2, {1e-3: 0, 1e-2: 0.5})
    assert (sparse.rows, sparse.learning_rate) == (2, 1e-3)
    assert dense.accuracy.by_seed == (0.5, 1.0)
    assert dense.accuracy.sampling_error == pytest.approx(0.25 / math.sqrt(N), rel=0.01)
    assert sparse.accuracy.by_seed == (0.5, 0.5)
    assert sparse.state_size == 2 * 2 * 8 * 8
    far = test_questions.distances_NK >= 8
    assert 0 < far.sum() < far.numel()
    hits = (test[2] & far).sum().item()
    assert dense.far.by_seed[0] == pytest.approx(hits / far.sum().item())


def test_figure_is_written_whole(tmp_path) -> None:
    path = tmp_path / "new" / "figure.png"
    draw([cell(32, None, (0.3,)), cell(32, 4, (0.5,)), cell(64, 8, (0.6,))], path, conditions="none")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["figure.png"]
