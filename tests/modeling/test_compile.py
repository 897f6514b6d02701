"""torch.compile without a graph break: the layer with every kind of setting, and a whole model with its loss."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.modeling.layout import SequenceLayout, row_layout
from tests.modeling.test_layer import KNOBS, model_with
from tests.modeling.tiny import prompts, tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: KNOBS[name] for name in ("paper", "gdn", "delta, separate")},
    "of nearly all": {"top_k": 3, "decay": "scalar"},
    "query heads, separate decays": {"state_heads": "query", "decay_params": "separate"},
}  # fmt: skip
"""every setting that has code of its own in a layer's forward, several to a compilation"""
MASK = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def trained(model: PreTrainedModel, run: Callable[..., Any], layout: SequenceLayout, **kwargs: Tensor) -> Results:
    """Output of one layer and every gradient."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=generator).requires_grad_()
    rotation = (torch.randn(1, 9, 8, dtype=torch.float64, generator=generator),) * 2
    out = run(x, rotation, layout, **kwargs)[0]
    (out * torch.randn(out.shape, dtype=torch.float64, generator=generator)).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in model.sse_layers()[0].named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **gradients}


def assert_equal(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-10, msg=name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_compiles_whole(name: str) -> None:
    model = model_with(SETTINGS[name]).train()
    layer = model.sse_layers()[0]
    layout = row_layout(2, 9, None)
    assert_equal(trained(model, compiled(layer), layout), trained(model, layer, layout))


def test_a_layer_compiles_with_padding() -> None:
    model = model_with({}).train()
    layer, layout = model.sse_layers()[0], row_layout(2, 9, MASK)
    assert_equal(trained(model, compiled(layer), layout), trained(model, layer, layout))


def test_the_routing_of_a_compiled_training_step_is_remembered() -> None:
    model = model_with({}).train()
    layer, layout = model.sse_layers()[0], row_layout(2, 9, None)
    trained(model, layer, layout)
    logits = layer.trace.logits_TN
    trained(model, compiled(layer), layout)
    torch.testing.assert_close(layer.trace.logits_TN, logits)


@torch.no_grad()
def test_a_compiled_forward_without_gradients_leaves_the_trace_alone() -> None:
    model = model_with({})
    layer, x = model.sse_layers()[0], torch.randn(2, 9, 32, dtype=torch.float64)
    out = layer(x, sse_layout=row_layout(2, 9, None))[0]
    before = layer.trace.logits_TN
    torch.testing.assert_close(compiled(layer)(x, sse_layout=row_layout(2, 9, None))[0], out)
    assert layer.trace.logits_TN is before


def test_a_whole_model_compiles_with_its_balance_loss() -> None:
    """Without a mask; test_traced_mask.py has those with one."""
    model = tiny_model("gpt_neox", ("sse",), dtype=torch.float64, num_hidden_layers=1).train()
    ids = prompts((20, 20))[0]

    def step(run: Callable[..., Any]) -> Results:
        model.zero_grad()
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **gradients}

    expected = step(model)
    assert_equal(step(compiled(model)), expected)
    assert model.sse_balance_loss().item() > 0
