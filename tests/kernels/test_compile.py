"""The torch backends under torch.compile: one graph, the same numbers, and operators registered as torch wants them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.torch.chunk import _opaque
from tests.kernels.cases import SHARED_NAMES, Case, run
from tests.tolerance import assert_same


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def call(x: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    shared = tuple(x[name] for name in SHARED_NAMES if name in x) or None
    rest = {name: tensor for name, tensor in x.items() if name not in SHARED_NAMES}
    o, final = sse_attention(**rest, shared=shared, output_final_state=True, **options)
    assert final is not None
    return o, final


def with_gradients(function: Callable[..., Any], x: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    o, final = function(leaves, options)
    loss = (o * o.detach().cos()).sum() + (final * final.detach().sin()).sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)]


CASES = (
    Case(lengths=(9, 0, 70), top_k=2, groups=2),
    Case(lengths=(5, 3), top_k=1, per_partition=True),
    Case(lengths=(9, 0, 70), top_k=2, delta=True),
)


@pytest.mark.parametrize(
    ("backend", "case"),
    [*((backend, case) for backend in ("varlen",) for case in CASES), ("auto", CASES[0])],
    ids=str,
)
def test_one_graph_with_the_same_numbers(backend: str, case: Case) -> None:
    options = {
        **case.options(),
        "backend": backend,
        "decay_normalizer": 4.0,
        "k_map": "l2" if case.delta else "softmax",
    }
    expected = with_gradients(call, case.inputs(), options)
    found = with_gradients(torch.compile(call, backend="aot_eager", fullgraph=True), case.inputs(), options)
    for i, (value, exact) in enumerate(zip(found, expected, strict=True)):
        assert_same(value, exact, str(i), 1e-12)


@torch.no_grad()
def test_a_decode_step_is_one_graph_that_overwrites_the_state() -> None:
    case = Case(lengths=(1, 1, 1), top_k=2)
    x, options = case.inputs(), {**case.options(), "max_seqlen": 1}
    o, final = run(case, "recurrent")
    found, state = torch.compile(call, backend="aot_eager", fullgraph=True)(x, {**options, "inplace_state": True})
    assert torch.equal(found, o)
    assert torch.equal(x["initial_state"], final)
    assert state.data_ptr() == x["initial_state"].data_ptr()


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    x = Case(lengths=(9, 0, 70), groups=2).inputs()
    q, k, v, log_decay = (x[name].detach().requires_grad_() for name in ("q", "k", "v", "log_decay"))
    state = x["initial_state"][:, 0].contiguous().requires_grad_()
    offsets = torch.tensor([0, 9, 9, 79])
    torch.library.opcheck(_opaque, (q.unflatten(1, (2, 2)), k, v, log_decay, None, state, offsets, 64))
