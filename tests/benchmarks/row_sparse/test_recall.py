"""Training many models at once: what they share, what sets them apart, and that they learn."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.paper.row_sparse.adamw import BETAS, EPSILON, AdamW
from benchmarks.paper.row_sparse.mixers import MixerName
from benchmarks.paper.row_sparse.model import ModelSettings
from benchmarks.paper.row_sparse.mqar import MQAR
from benchmarks.paper.row_sparse.recall import (
    WARM_UP,
    Budget,
    Pause,
    Paused,
    Questions,
    Run,
    _schedule,
    answers,
    new_models,
    train,
)
from benchmarks.paper.row_sparse.update import RowSparse
from sse_convert.errors import UsageError

CPU = torch.device("cpu")
TASK = MQAR(length=16, pairs=2, vocab_size=20)
SETTINGS = ModelSettings(mixer="metala", width=16, vocab_size=20)


def run(seed: int = 0, *, noise: bool = False, update: RowSparse | None = None, learning_rate: float = 1e-2) -> Run:
    return Run(noise=noise, update=update, learning_rate=learning_rate, seed=seed)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions.draw(TASK, 256, 5, CPU)


def test_both_settings_ask_the_same(questions: Questions) -> None:
    zeros, noise = questions.inputs_SNT
    assert torch.equal(zeros[zeros != 0], noise[zeros != 0])
    assert not torch.equal(zeros, noise)
    assert torch.equal(zeros.gather(1, questions.positions_NK), noise.gather(1, questions.positions_NK))


def test_equal_seeds_start_equal_and_others_do_not() -> None:
    model = new_models(SETTINGS, [run(0), run(1), run(0, noise=True, update=RowSparse(rows=2))])
    for name, weight in model.named_parameters():
        assert torch.equal(weight[0], weight[2]), name
        if weight[0].std() > 0:
            assert not torch.equal(weight[0], weight[1]), name


def test_new_models_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    new_models(SETTINGS, [run(0)])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_does_not_depend_on_its_company(questions: Questions) -> None:
    sparse = run(3, noise=True, update=RowSparse(rows=2), learning_rate=3e-3)
    budget = Budget(steps=5, batch=8, balance=0.1)
    together = train(SETTINGS, [run(0), run(1), sparse], questions, budget)
    alone = train(SETTINGS, [sparse], questions, budget)
    for (name, weight), own in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight[2:], own, atol=1e-5, rtol=1e-4, msg=name)


def test_the_balance_loss_acts_on_row_sparse_models_alone(questions: Questions) -> None:
    runs = [run(0), run(0, update=RowSparse(rows=2))]
    without, with_it = (train(SETTINGS, runs, questions, Budget(steps=4, batch=8, balance=b)) for b in (0.0, 10.0))
    pairs = list(zip(without.parameters(), with_it.parameters(), strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in pairs)
    assert not all(torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.smoke
def test_models_learn_to_recall() -> None:
    task = MQAR(length=8, pairs=2, vocab_size=10)
    settings = ModelSettings(mixer="gsa", width=16, vocab_size=10)
    runs = [run(0, update=RowSparse(rows=2), learning_rate=2e-2), run(0, learning_rate=0.0)]
    model = train(settings, runs, Questions.draw(task, 2000, 6, CPU), Budget(steps=150, batch=32))
    learned, untrained = answers(model, runs, Questions.draw(task, 200, 5, CPU)).double().mean((1, 2))
    assert learned > 0.8
    assert untrained < 0.3


def test_a_paused_training_ends_as_one_that_was_not(questions: Questions, tmp_path: Path) -> None:
    """Each process does one step; what another budget has kept is refused."""
    runs, budget = [run(0), run(1, update=RowSparse(rows=2))], Budget(steps=3, batch=8)
    pause = Pause(path=tmp_path / "kept.pt", end=0.0)
    for _ in range(2):
        with pytest.raises(Paused):
            train(SETTINGS, runs, questions, budget, pause)
    with pytest.raises(UsageError, match="kept from other models"):
        train(SETTINGS, runs, questions, Budget(steps=4, batch=8), pause)
    paused = train(SETTINGS, runs, questions, budget, pause)
    at_once = train(SETTINGS, runs, questions, budget)
    assert all(torch.equal(a, b) for a, b in zip(paused.parameters(), at_once.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["gla", "metala", "gsa"])
def test_captured_steps_are_the_steps(mixer: MixerName) -> None:
    """On a GPU the first steps run as they are and the others as a CUDA graph; weights end where the CPU's end."""
    settings = ModelSettings(mixer=mixer, width=32, vocab_size=20)
    runs = [run(0), run(1, noise=True, update=RowSparse(rows=4))]
    budget = Budget(steps=8, batch=8, balance=0.1)
    devices = (CPU, torch.device("cuda"))
    cpu, gpu = (train(settings, runs, Questions.draw(TASK, 256, 5, device), budget) for device in devices)
    start = new_models(settings, runs)
    for (name, exact), own, first in zip(cpu.named_parameters(), gpu.parameters(), start.parameters(), strict=True):
        moved = (exact - first).norm()
        assert (own.cpu() - exact).norm() <= 0.05 * moved, name


def test_answers_are_right_or_wrong_token_by_token(questions: Questions) -> None:
    model = new_models(SETTINGS, [run(0), run(0, noise=True)])
    got = answers(model, [run(0), run(0, noise=True)], questions)
    assert got.shape == (2, 256, 2)
    positions = questions.positions_NK[None]
    for r in range(2):
        inputs = questions.inputs_SNT[r : r + 1]
        logits, _ = model(inputs.expand(2, -1, -1), positions.expand(2, -1, -1))
        assert torch.equal(got[r], logits[r].argmax(-1) == questions.values_NK)


def test_adamw_is_torch_adamw_with_a_rate_per_model() -> None:
    start = torch.randn(3, 4, 5, dtype=torch.float64)
    rates = [1e-2, 3e-3, 0.0]
    ours = start.clone()
    optimizer = AdamW([ours], torch.tensor(rates, dtype=torch.float64), weight_decay=0.1)
    theirs = [x.clone().requires_grad_() for x in start]
    references = [
        torch.optim.AdamW([x], lr=lr, betas=BETAS, eps=EPSILON, weight_decay=0.1)
        for x, lr in zip(theirs, rates, strict=True)
    ]
    for step in range(20):
        factor = 0.5 if step > 10 else 1.0
        gradient = torch.randn_like(start)
        optimizer.step([gradient], torch.tensor(factor))
        for x, own, reference, lr in zip(theirs, gradient, references, rates, strict=True):
            x.grad = own
            reference.param_groups[0]["lr"] = lr * factor
            reference.step()
    torch.testing.assert_close(ours, torch.stack(theirs).detach(), rtol=1e-6, atol=1e-7)


def test_schedule_warms_up_and_cools_down() -> None:
    steps = list(_schedule([run(0), run(1), run(0)], 100, Budget(steps=100, batch=7)))
    factors = [factor for _, factor in steps]
    assert factors[0] == pytest.approx(1 / (WARM_UP * 100))
    assert max(factors) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.04)))
    assert factors[-1] < 0.001
    assert all(torch.equal(rows[0], rows[2]) for rows, _ in steps)
    assert not torch.equal(steps[0][0][0], steps[0][0][1])


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(UsageError, match="0 steps"):
        Budget(steps=0)
