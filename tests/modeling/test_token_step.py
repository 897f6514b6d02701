"""A layer's step of one token per row on a CPU: what the operator computes, in few operators."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from sse_convert.inference.cuda_graphs import graphed
from sse_convert.modeling.initialise import PreciseProjection
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.state_cache import SSECacheLayer
from sse_convert.modeling.token_step import LayerStep
from tests.modeling.test_layer import KNOBS, model_with
from tests.modeling.tiny import HEADS, MIXERS, prompts, tiny_model, tiny_source

WITHOUT = {
    "N=1", "reads more", "reads less", "gla", "gla, rope, query heads", "gdn", "gdn, rope, query heads", "keys",
    "keys, delta", "keys, no gate, rope",
}  # fmt: skip
"""settings whose layers have no such step"""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[LayerStep]:
    """The steps that ran."""
    ran: list[LayerStep] = []
    plain = LayerStep.__call__

    def step(self: LayerStep, *args: Any) -> tuple[Tensor, Tensor]:
        ran.append(self)
        return plain(self, *args)

    monkeypatch.setattr(LayerStep, "__call__", step)
    return ran


def continued(model: Any, ids: Tensor, cache: DynamicCache | None = None, prefill: int = 8) -> tuple[Tensor, Any]:
    """Logits of rows of tokens, the first `prefill` at once and then one by one; and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    parts = [ids[:, :prefill], *ids[:, prefill:].split(1, 1)]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts if part.numel()], 1), cache


@pytest.mark.parametrize("name", KNOBS)
@torch.no_grad()
def test_equals_the_operator(name: str, steps: list[LayerStep], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_with(KNOBS[name]), prompts((12, 12))[0]
    found, cache = continued(model, ids)
    assert len(steps) == (0 if name in WITHOUT else 8)
    monkeypatch.setattr(SSEAttention, "step", lambda *args: None)
    expected, other = continued(model, ids)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if isinstance(mine, SSECacheLayer):
            torch.testing.assert_close(mine.state, theirs.state, atol=1e-11, rtol=0)
            assert mine.get_seq_length() == theirs.get_seq_length() == 12


@torch.no_grad()
def test_remembers_what_it_routed(steps: list[LayerStep]) -> None:
    model, ids = model_with({}), prompts((12, 12))[0]
    continued(model, ids)
    layer = model.sse_layers()[0]
    assert steps
    assert layer.trace.logits_TN.shape == (2, 4)
    assert layer.router_stats()["load"].sum() == 1


@torch.no_grad()
def test_follows_weights_that_change(steps: list[LayerStep]) -> None:
    model, ids = model_with({}), prompts((12, 12))[0]
    _, cache = continued(model, ids[:, :10])
    model.sse_layers()[0].sse_decay_down.weight.mul_(-3)
    again = copy.deepcopy(cache)  # whose step is made from the new weights
    found, expected = (model(ids[:, 10:11], past_key_values=each).logits for each in (cache, again))
    assert len(steps) == 8
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@torch.no_grad()
def test_copies_of_a_cache_hold_no_weights(steps: list[LayerStep]) -> None:
    model, ids = model_with({}), prompts((12, 12))[0]
    prefilled, stepped = (continued(model, ids, prefill=length)[1].layers[0] for length in (12, 11))
    assert len(steps) == 2
    assert len(pickle.dumps(stepped)) == len(pickle.dumps(prefilled))


class Adapted(PreciseProjection):
    """A projection that somebody changed."""


@pytest.mark.parametrize("change", ["class", "hook", "forward"])
@torch.no_grad()
def test_leaves_projections_with_something_around_them_to_themselves(change: str, steps: list[LayerStep]) -> None:
    model, ids, calls = model_with({}), prompts((12, 12))[0], []
    router = model.sse_layers()[0].sse_router
    if change == "class":
        router.__class__ = Adapted
    elif change == "hook":
        router.register_forward_hook(lambda *args: calls.append(args))
    else:
        router.forward = lambda x: calls.append(x) or PreciseProjection.forward(router, x)
    continued(model, ids)
    assert len(steps) == 4, "the other layer's"
    assert len(calls) == (0 if change == "class" else 5)


@pytest.mark.parametrize("why", ["gradients", "padding", "recording", "autocast", "backend"])
def test_leaves_to_the_operator_what_it_is_not_for(why: str, steps: list[LayerStep]) -> None:
    model, (ids, mask) = model_with({}, dtype=torch.float32), prompts((12, 12))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
    if why == "recording":
        cache.activate_past_recording()
    if why == "backend":
        for layer in model.sse_layers().values():
            layer.backend = "reference"
    if why == "padding":
        mask[0, 8:] = 0
    with torch.set_grad_enabled(why == "gradients"), torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        model(ids[:, 8:9], past_key_values=cache, attention_mask=mask[:, :9])
    assert steps == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_low_precision_is_as_near(dtype: torch.dtype, steps: list[LayerStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the operator is."""
    model, ids = tiny_model("qwen3", HEADS, dtype=torch.float64), prompts((12, 12))[0]
    exact, _ = continued(model, ids)
    steps.clear()
    mine, _ = continued(model.to(dtype), ids)
    assert len(steps) == 8
    monkeypatch.setattr(SSEAttention, "step", lambda *args: None)
    theirs, _ = continued(model, ids)
    near, as_near = ((x.double() - exact).abs().max() for x in (mine, theirs))
    assert near <= 1.5 * as_near


class Operators(TorchDispatchMode):
    """Counts what torch runs, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(model: PreTrainedModel) -> int:
    """Of one step, when the windows are full."""
    ids = prompts((12, 12))[0][:1]
    with graphed(model, slots=32):
        _, cache = continued(model, ids)
        with Operators() as ran:
            model(ids[:, :1], past_key_values=cache)
    return ran.count


MANY = {"num_partitions": 4, "top_k": 2, "state_heads": "query"}
RECOMMENDED = {**MANY, "update": "delta", "k_feature_map": "l2", "decay_params": "separate"}


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        ("sse", MANY, 40),
        ("sse+sliding", MANY, 95),
        ("sse+sliding", RECOMMENDED, 115),
        ("sliding", {}, 5),
    ],
)
@torch.no_grad()
def test_a_layer_runs_few_operators_more_than_its_teacher(kind: str, settings: dict[str, Any], most: int) -> None:
    plain = operators(tiny_source("qwen3"))
    layout = (kind, "full", kind, "full")
    mine = operators(tiny_model("qwen3", layout, {kind: {**MIXERS[kind], **settings}}, dtype=torch.float32))
    assert mine - plain <= 2 * most
