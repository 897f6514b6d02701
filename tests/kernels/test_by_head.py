"""Partitions that every head chooses for itself: every backend equals the loop."""

import dataclasses as dc
from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.dispatch import sse_attention
from tests.kernels.by_head_cases import by_loop, inputs_of, run
from tests.kernels.cases import BACKENDS, Case

USUAL = Case(lengths=(5, 0, 9), num_partitions=5, top_k=2, groups=2, delta=True, renormalise=True, shared=False)
CASES = [
    USUAL,
    dc.replace(USUAL, shared=True),
    dc.replace(USUAL, delta=False, initial_state=False),
    dc.replace(USUAL, shared=True, delta=False, renormalise=False, top_k=1),
    dc.replace(USUAL, write_gate=False, renormalise=False),
    dc.replace(USUAL, read_gate=False, top_k=3),
]
STEP = dc.replace(USUAL, lengths=(1, 1, 1))
STEPS = [STEP, dc.replace(STEP, shared=True), *(dc.replace(case, lengths=(1, 1)) for case in CASES[2:])]


def with_state(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    states = len(case.lengths), case.num_partitions + case.shared, case.heads, case.dim, case.value_dim
    return {"initial_state": torch.zeros(states, dtype=torch.float64), **x}


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop(case: Case, backend: str) -> None:
    """Outputs, states and gradients of everything."""
    x = {name: tensor.requires_grad_() for name, tensor in inputs_of(case).items()}
    x["k_scale"] = torch.tensor([0.9, 0.5], dtype=torch.float64, requires_grad=True)
    expected = by_loop(case, x)
    found = run(case, backend, x)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).double() for part in expected]
    for want, have in zip(*(gradients(x, parts, weights) for parts in (expected, found)), strict=True):
        torch.testing.assert_close(have, want)


def gradients(x: dict[str, Tensor], parts: Any, weights: list[Tensor]) -> tuple[Tensor, ...]:
    loss = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
    return torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("inplace", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("case", STEPS, ids=str)
@torch.no_grad()
def test_a_step_equals_the_loop(case: Case, inplace: bool) -> None:
    x = with_state(case, inputs_of(case))
    given = x["initial_state"].clone()
    expected = by_loop(case, x)
    o, state = run(case, "auto", x, max_seqlen=1, inplace_state=inplace)
    torch.testing.assert_close((o, state), expected)
    assert (state is x["initial_state"]) == inplace
    assert inplace or torch.equal(x["initial_state"], given)


@torch.no_grad()
def test_a_step_touches_only_the_partitions_that_are_written() -> None:
    x = with_state(STEP, inputs_of(STEP))
    for name in ("router_logits", "read_logits"):
        x[name][..., 3] = -100.0
    x["initial_state"][:, 3] = float("nan")
    o, state = run(STEP, "auto", x, max_seqlen=1)
    assert o.isfinite().all()
    assert state is not None
    assert state[:, [0, 1, 2, 4]].isfinite().all()


@torch.no_grad()
def test_prefill_and_steps_round_alike() -> None:
    """Keys in bfloat16 times a scale."""
    case = dc.replace(USUAL, lengths=(8,), initial_state=False)
    x = {name: tensor.bfloat16() for name, tensor in inputs_of(case).items()}
    x["k_scale"] = torch.tensor([1.3, 0.7])
    whole = run(case, "auto", x)[1]
    alone, state = dc.replace(case, lengths=(1,)), torch.zeros_like(whole)
    for t in range(8):
        token = {name: tensor if name == "k_scale" else tensor[t : t + 1] for name, tensor in x.items()}
        _, state = run(alone, "auto", {**token, "initial_state": state}, max_seqlen=1)
    torch.testing.assert_close(state, whole, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_states_in_slots() -> None:
    x = with_state(STEP, inputs_of(STEP))
    expected_o, expected = run(STEP, "auto", x, max_seqlen=1)
    slots = torch.tensor([4, 0, 2])
    pages = torch.zeros(5, *x["initial_state"].shape[1:])
    pages[slots] = x["initial_state"].float()
    x = {**x, "initial_state": pages}
    o, _ = run(STEP, "auto", x, max_seqlen=1, state_slots=slots, inplace_state=True)
    torch.testing.assert_close(o, expected_o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pages[slots], expected.float(), rtol=1e-5, atol=1e-5)
    assert not pages[[1, 3]].any()


@pytest.mark.parametrize("backend", ["auto", "varlen", "recurrent"])
@torch.no_grad()
def test_no_tokens(backend: str) -> None:
    case = dc.replace(USUAL, lengths=(0, 0))
    x = inputs_of(case)
    o, state = run(case, backend, x)
    assert o.shape == (0, case.heads * case.groups, case.value_dim)
    torch.testing.assert_close(state, x["initial_state"])


@torch.no_grad()
def test_heads_in_turn() -> None:
    """A few heads at a time, as where states are large, have their own choices."""
    case = dc.replace(USUAL, heads=3, initial_state=False)
    x = inputs_of(case)
    expected, _ = by_loop(case, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sse_convert.kernels.dispatch.STATES_AT_ONCE", 1)
        o, _ = run(case, "auto", x, output_final_state=False)
    torch.testing.assert_close(o, expected)


@torch.no_grad()
def test_one_choice_of_all_heads_is_a_special_case() -> None:
    case = dc.replace(USUAL, initial_state=False)
    x = inputs_of(case)
    logits = x.pop("read_logits")[:, 0]
    alike = logits[:, None].expand(-1, case.heads, -1)
    expected = run(case, "auto", {**x, "router_logits": logits})
    torch.testing.assert_close(run(case, "auto", {**x, "router_logits": alike, "read_logits": alike}), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read_logits": torch.zeros(14, 2, 4)}, r"read_logits has shape \[14, 2, 4\]"),
        ({"router_logits": torch.zeros(14, 5)}, r"router_logits has shape \[14, 5\]"),
        ({"read_logits": None}, r"router_logits has shape \[14, 2, 5\]"),
        ({"v": torch.zeros(14, 5, 2, 6)}, r"v has shape \[14, 5, 2, 6\]"),
        ({"v": torch.zeros(14, 5, 2, 6)}, "3 dimensions with read_logits"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    x = {name: tensor.float() for name, tensor in inputs_of(USUAL).items()}
    with pytest.raises((ShapeError, UsageError), match=message):
        sse_attention(**{**x, **changes}, top_k=2, cu_seqlens=USUAL.cu_seqlens)
