"""The Triton kernels through the doors that callers use: the public operator, and a layer of a model, compiled too."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from sse_convert.compat import of_any_length
from sse_convert.modeling.layout import SequenceLayout, document_layout, row_layout
from tests.kernels.cases import Case, run
from tests.modeling.test_layer import KNOBS, model_with
from tests.tolerance import assert_as_accurate, assert_same

CASE = Case(lengths=(9, 70), top_k=2, groups=2, dim=16, value_dim=16)
STEP = Case(lengths=(1, 1, 1), top_k=2, dim=16, value_dim=16)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    counters.clear()
    yield
    torch._dynamo.reset()


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in case.inputs(torch.float32).items()}


@pytest.mark.parametrize("case", [CASE, STEP], ids=["prefill", "step"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_state_written_in_place(case: Case, contiguous: bool, device: str) -> None:
    x = inputs(case, device)
    expected_o, expected = run(case, "reference")
    if not contiguous:
        x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    o, final = run(case, "triton", x, inplace_state=True)
    assert final is x["initial_state"] or final.data_ptr() == x["initial_state"].data_ptr()
    assert_same(o.cpu(), expected_o, "o", 1e-5)
    assert_same(x["initial_state"].cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize("case", [CASE, STEP], ids=["prefill", "step"])
def test_initial_state_is_left_alone_otherwise(case: Case, device: str) -> None:
    x = inputs(case, device)
    before = x["initial_state"].clone()
    run(case, "triton", x)
    assert torch.equal(x["initial_state"], before)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
def test_no_tokens_return_the_states_as_they_are(lengths: tuple[int, ...], device: str) -> None:
    case = Case(lengths=lengths, dim=16, value_dim=16)
    x = inputs(case, device)
    o, final = run(case, "triton", x)
    assert o.shape == (0, 2, 16)
    assert torch.equal(final, x["initial_state"])


def trained(model: torch.nn.Module, layer: torch.nn.Module, layout: SequenceLayout, device: str) -> dict[str, Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 32, generator=generator).to(device).requires_grad_()
    out = layer(x, None, layout)[0]
    (out * torch.randn(out.shape, generator=generator).to(device)).sum().backward()
    assert x.grad is not None
    named = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **{name.removeprefix("_orig_mod."): g for name, g in named.items()}}


SETTINGS: dict[str, dict[str, Any]] = {
    "paper": KNOBS["paper"],
    "delta, separate": {**KNOBS["delta, separate"], "num_partitions": 2},
    "others": {"top_k": 3, "k_feature_map": "silu", "decay": "scalar", "state_heads": "query"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_trains_on_triton_as_on_torch(name: str, device: str) -> None:
    """Eager and compiled in one graph: within 1e-5 of float64, or as near to it as the torch operator in float32."""
    single = model_with(SETTINGS[name], dtype=torch.float32).train().to(device)
    double = copy.deepcopy(single).double()
    layout = row_layout(2, 9, None, device)
    layer, exact_layer = single.sse_layers()[0], double.sse_layers()[0]
    exact_layer.register_forward_pre_hook(lambda module, args: (args[0].double(), *args[1:]))
    exact = trained(double, exact_layer, layout, device)
    on_torch = trained(single, layer, layout, device)
    layer.backend = "triton"
    eager = trained(single, layer, layout, device)
    compiled = trained(single, torch.compile(layer, backend="aot_eager", fullgraph=True), layout, device)
    assert eager.keys() == compiled.keys() == exact.keys()
    for key, value in exact.items():
        assert_as_accurate(eager[key], on_torch[key], value, key, floor=1e-5)
        assert torch.equal(compiled[key], eager[key]), key


def test_a_compiled_layer_takes_rows_of_other_documents(device: str) -> None:
    """The number of documents is a symbol from the start, and stays one of the kernels' sizes: by the delta rule, whose
    kernels the whole models of tests/training/test_compiling.py have not."""
    model = model_with({**KNOBS["delta"], "num_partitions": 2}, dtype=torch.float32).train().to(device)
    layer = model.sse_layers()[0]
    layer.backend = "triton"
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for starts in ([], [2, 5]):
        begins = torch.zeros(2, 9, dtype=torch.bool, device=device)
        begins[:, 0] = begins[0, starts] = True
        layout = document_layout(begins)
        of_any_length(layout.cu_seqlens)
        found = trained(model, compiled, layout, device)
    for key, value in trained(model, layer, document_layout(begins), device).items():
        assert torch.equal(found[key], value), key
    assert counters["stats"]["unique_graphs"] == 1
