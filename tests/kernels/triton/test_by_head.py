"""Partitions that every head chooses for itself, on the Triton kernels."""

import dataclasses as dc

import pytest
import torch

from tests.kernels.by_head_cases import by_loop, inputs_of, run
from tests.kernels.cases import Case
from tests.tolerance import assert_same

USUAL = Case(
    lengths=(40, 3), num_partitions=5, top_k=2, dim=16, value_dim=16, delta=True, renormalise=True, shared=False
)
CASES = [USUAL, dc.replace(USUAL, shared=True, groups=2), dc.replace(USUAL, delta=False, initial_state=False)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop(case: Case, device: str) -> None:
    """Outputs, states and gradients of everything."""
    x = {name: tensor.requires_grad_() for name, tensor in inputs_of(case).items()}
    expected = by_loop(case, x)
    mine = {name: tensor.detach().float().to(device).requires_grad_() for name, tensor in x.items()}
    found = run(case, "triton", mine)
    grads = []
    for inputs, parts in ((x, expected), (mine, found)):
        loss = sum((part.double().cpu() * torch.linspace(-1, 1, part.numel()).view(part.shape)).sum() for part in parts)
        grads.append(torch.autograd.grad(loss, list(inputs.values())))
    assert_same(found[0].double().cpu(), expected[0], "o", 1e-5)
    assert_same(found[1].double().cpu(), expected[1], "state", 1e-5)
    for name, have, want in zip(x, grads[1], grads[0], strict=True):
        assert_same(have.double().cpu(), want, name, 1e-5)


@torch.no_grad()
def test_a_step_equals_the_loop(device: str) -> None:
    case = dc.replace(USUAL, lengths=(1, 1), shared=True)
    x = inputs_of(case)
    expected = by_loop(case, x)
    mine = {name: tensor.float().to(device) for name, tensor in x.items()}
    o, state = run(case, "triton", mine, max_seqlen=1, inplace_state=True)
    assert state is mine["initial_state"]
    assert_same(o.double().cpu(), expected[0], "o", 1e-5)
    assert_same(state.double().cpu(), expected[1], "state", 1e-5)
