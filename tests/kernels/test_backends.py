"""Every backend computes what the reference defines: outputs, final states, and the gradient of every input."""

import dataclasses as dc
import random
from itertools import product
from typing import Any

import pytest
import torch

from tests.kernels.cases import BACKENDS, Case, run, run_with_gradients
from tests.tolerance import assert_same

LAYOUTS = ((0, 1, 2, 0, 3), (63, 64, 65), (1, 0, 70, 33), (150,))
ROUTINGS = ((1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (8, 1), (8, 2), (8, 8))


def _grid(*, delta: bool = False) -> list[Case]:
    """Every routing with the short layout and one of the others in turn; the other settings are drawn, the same ones on
    every run."""
    draw = random.Random(int(delta))
    met = [(routing, LAYOUTS[at]) for i, routing in enumerate(ROUTINGS) for at in (0, 1 + i % 3)]
    return [
        Case(
            lengths=lengths,
            num_partitions=n,
            top_k=k,
            groups=draw.choice((1, 2, 3)),
            shared=draw.random() < 0.7,
            per_partition=draw.random() < 0.3,
            write_gate=draw.random() < 0.7,
            read_gate=draw.random() < 0.7,
            initial_state=draw.random() < 0.7 or k == n,  # or all states are alike, and gates have no gradient
            delta=delta,
            seed=i,
        )
        for i, ((n, k), lengths) in enumerate(met)
    ]


def _variants() -> list[Case]:
    """The full product of the settings that change what is computed, on short sequences."""
    switches = product((True, False), (True, False), (True, False), (True, False), (1, 2))
    return [
        Case(lengths=(3, 9), top_k=2, write_gate=w, read_gate=r, shared=s, per_partition=p, groups=g)
        for w, r, s, p, g in switches
    ]


def _delta_variants() -> list[Case]:
    """Settings that act on the delta rule or only exist beside it."""
    delta = Case(lengths=(3, 70), top_k=2, delta=True, groups=2)
    changes: list[dict[str, Any]] = [
        {}, {"write_gate": False}, {"per_partition": True}, {"shared": False, "initial_state": False},
        {"decay_scale": 100.0}, {"decay_scale": 0.0}, {"dim": 3, "value_dim": 5, "groups": 3},
    ]  # fmt: skip
    return [dc.replace(delta, **change) for change in changes]


@pytest.mark.parametrize("case", _grid() + _variants() + _grid(delta=True) + _delta_variants(), ids=str)
def test_backends_equal_the_reference(case: Case) -> None:
    exact = run_with_gradients(case, "reference")
    for backend in BACKENDS:
        for name, value in run_with_gradients(case, backend).items():
            assert_same(value, exact[name], f"{backend} {name}")


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
def test_no_tokens_return_the_states_as_they_are(lengths: tuple[int, ...]) -> None:
    case = Case(lengths=lengths)
    for backend in ("reference", *BACKENDS):
        result = run_with_gradients(case, backend)
        assert result["o"].shape == (0, 2, 6)
        assert torch.equal(result["final"], case.inputs()["initial_state"])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_missing_initial_state_means_zeros(backend: str) -> None:
    case = Case(lengths=(4, 70), initial_state=False)
    zeros = {**case.inputs(), "initial_state": torch.zeros(2, 5, 2, 8, 6, dtype=torch.float64)}
    without, with_zeros = run_with_gradients(case, backend), run_with_gradients(case, backend, zeros)
    for name, value in without.items():
        assert torch.equal(value, with_zeros[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_decay_view_equals_its_copy(backend: str) -> None:
    """A scalar decay per head arrives as a view with stride 0 and must not be materialised by the caller."""
    case = Case(lengths=(70,), shared=False)
    inputs = case.inputs()
    scalar = inputs["log_decay"][..., :1].clone().requires_grad_()
    exact = run_with_gradients(case, "reference", {**inputs, "log_decay": scalar.detach().expand(-1, -1, 8).clone()})
    o, _ = run(case, backend, {**inputs, "log_decay": scalar.expand(-1, -1, 8)})
    assert_same(o.detach(), exact["o"], "o")
    o.sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.isfinite().all()
