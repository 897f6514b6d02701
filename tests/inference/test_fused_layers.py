"""Steps of fused layers compute what plain layers compute, in few launches, and what cannot be fused says why."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sse_convert.inference.cuda_graphs import TokenStep, graphed
from sse_convert.inference.fused_layers import FAMILIES, FusedLayer, fused, fused_layers, not_fused
from sse_convert.inference.fused_weights import FEW_ROWS
from sse_convert.kernels import triton_backend
from sse_convert.modeling import generation
from sse_convert.modeling.initialise import NewProjection
from tests.inference.launches import counted
from tests.inference.test_cuda_graphs import plain_steps, prefill
from tests.modeling.tiny import PAD, prompts, tiny_model, tiny_source

STEPS = 2
PRODUCTS = {"row_products_kernel": 1, "token_heads_kernel": 1, "gated_product_kernel": 1, "added_product_kernel": 2}
"""launches of a whole layer"""
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
"""of float32 logits"""
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("llama", "mistral", "qwen2", "qwen3", "smollm3")},
    "biases and odd widths": ("llama", {"attention_bias": True, "hidden_size": 40, "intermediate_size": 44}),
    "a head of its own": ("qwen3", {"tie_word_embeddings": False}),
}
DECAYED = {"kind": "sse", "qk_rank": 4}
MIXERS: dict[str, dict[str, Any]] = {
    "a side path, states of key heads": DECAYED,
    "the paper's": {"kind": "paper", "qk_rank": 0},
    "the recommended": {"kind": "sse", "qk_rank": 4, "num_partitions": 5, "top_k": 2},
    "the delta rule, one decay": {"kind": "gdn"},
    "one state": {"kind": "gla"},
}


@pytest.fixture(autouse=True)
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run where the tests do."""
    monkeypatch.setattr(triton_backend, "GPU", device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def source(name: str, device: str, layers: int = 2) -> PreTrainedModel:
    family, options = SOURCES[name]
    rotated = {"no_rope_layers": [1, 0]} if family == "smollm3" else {}
    return tiny_source(family, num_hidden_layers=layers, **rotated, **options).to(device)


def hybrid(mixer: dict[str, Any], device: str) -> PreTrainedModel:
    return tiny_model("qwen3", ("own",), {"own": mixer}, num_hidden_layers=1).to(device)


def by_kernels(model: PreTrainedModel) -> None:
    """Steps of converted layers run on kernels from now on, wherever the model is."""
    for layer in getattr(model, "sse_layers", dict)().values():
        layer.backend = "triton"


def assert_steps_agree(model: PreTrainedModel, lengths: tuple[int, ...] = (11, 7)) -> dict[str, int]:
    """Logits of steps, and tokens, equal those over a growing cache in plain layers; the launches of a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "GPU", "none")
        expected, last = plain_steps(model, *prefill(model, lengths), STEPS)
        cache, mask, tokens = prefill(model, lengths)
    by_kernels(model)
    step = TokenStep(model, cache, tokens, 20, mask if not bool(mask.all()) else None)
    with counted() as launches:
        logits = torch.stack([step().clone() for _ in range(STEPS)], 1)
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert torch.equal(step.tokens, last)
    assert not [layer for layer in model.modules() if "forward" in vars(layer)], "left as it was"
    return {name: launches.by_name[name] // STEPS for name in PRODUCTS}


def whole(layers: int) -> dict[str, int]:
    return {name: count * layers for name, count in PRODUCTS.items()}


def test_every_family_is_tried() -> None:
    assert {family.lower() for family in FAMILIES} == {family for family, _ in SOURCES.values()}


@pytest.mark.parametrize("name", SOURCES)
def test_teachers(name: str, device: str) -> None:
    """One layer of each; two where a family rotates some alone."""
    layers = 2 if name == "smollm3" else 1
    model = source(name, device, layers)
    assert not not_fused(model)
    found = assert_steps_agree(model)
    assert device == "cuda" or found == whole(layers)


@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name: str, device: str) -> None:
    model = hybrid(MIXERS[name], device)
    assert not not_fused(model)
    found = assert_steps_agree(model)
    assert device == "cuda" or found == whole(1)


def test_weights_changed_between_steps_count(device: str) -> None:
    """Nothing is copied: a step reads the weights where they are."""
    model = hybrid(DECAYED, device)
    held = sum(p.numel() for p in model.parameters())
    assert_steps_agree(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    assert_steps_agree(model)
    assert sum(p.numel() for p in model.parameters()) == held
    step = fused(model)[model.model.layers[0]]
    assert step._network._gate.data_ptr() == model.model.layers[0].mlp.gate_proj.weight.data_ptr()


@pytest.mark.parametrize("mixer", ["the recommended", "the paper's"])
def test_libraries_multiply_many_rows(mixer: str, device: str) -> None:
    found = assert_steps_agree(hybrid(MIXERS[mixer], device), (7,) * (FEW_ROWS + 1))
    assert device == "cuda" or found == {**dict.fromkeys(PRODUCTS, 0), "token_heads_kernel": 1}


def test_long_inputs_gradients_and_autocast_run_plain_layers(device: str) -> None:
    model = source("qwen3", device)
    ids = prompts((7,))[0].to(device)
    one = ids[:, :1]

    def calls() -> tuple[int, Any]:
        with counted() as launches:
            out = model(ids).logits, model(one).logits
        return sum(launches.by_name[name] for name in PRODUCTS), out

    with fused_layers(model):
        assert calls()[0] == 0
    with torch.no_grad(), torch.autocast(device, torch.bfloat16), fused_layers(model):
        assert calls()[0] == 0


class Adapted(nn.Linear):
    """A linear layer with something around it, as adapters have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


def _adapt(owner: nn.Module, name: str) -> None:
    before = getattr(owner, name)
    made = Adapted(before.in_features, before.out_features, bias=before.bias is not None, device=before.weight.device)
    made.load_state_dict(before.state_dict())
    setattr(owner, name, made)


def _double(module: nn.Module, inputs: Any, output: Any) -> Any:
    return 2 * output


def _hooked_projection(layer: Any) -> None:
    layer.self_attn.k_proj.register_forward_hook(_double)


def _hooked_network(layer: Any) -> None:
    layer.mlp.register_forward_hook(_double)


def _hooked_norm(layer: Any) -> None:
    layer.input_layernorm.register_forward_hook(_double)


def _wrapped_projection(layer: Any) -> None:
    projection = layer.self_attn.o_proj
    projection.forward = functools.partial(lambda plain, x: 2 * plain(x), projection.forward)


class OwnNetwork(nn.Module):
    """In place of a layer's network, without what such networks have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


CHANGES: dict[str, tuple[Any, str, str]] = {
    "an adapter on q": (lambda layer: _adapt(layer.self_attn, "q_proj"), "self_attn", "Adapted"),
    "an adapter on down": (lambda layer: _adapt(layer.mlp, "down_proj"), "mlp", "Adapted"),
    "a hook on k": (_hooked_projection, "self_attn", "k_proj"),
    "a hook on the network": (_hooked_network, "mlp", "hooks"),
    "a hook on a norm": (_hooked_norm, "self_attn", "input_layernorm"),
    "a projection with another's forward": (_wrapped_projection, "self_attn", "o_proj"),
    "another activation": (lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()), "mlp", "activation"),
    "another network": (lambda layer: setattr(layer, "mlp", OwnNetwork()), "mlp", "OwnNetwork"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_more_than_its_weights_is_called(name: str, device: str) -> None:
    """The other half of the layer is fused all the same: networks are those of the teacher in either model."""
    change, part, why = CHANGES[name]
    model = source("qwen3", device) if part == "mlp" else hybrid(DECAYED, device)
    change(model.model.layers[0])
    found = not_fused(model)
    assert found.keys() == {f"model.layers.0.{part}"}
    assert why in found[f"model.layers.0.{part}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "GPU", "none")
        expected, _ = plain_steps(model, *prefill(model, (7,)), 1)
        cache, _, tokens = prefill(model, (7,))
    by_kernels(model)
    torch.testing.assert_close(TokenStep(model, cache, tokens, 20)(), expected[:, 0], **CLOSE)


def test_weights_in_another_dtype_are_not_read(device: str) -> None:
    model = source("qwen3", device)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.bfloat16()
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data.t().contiguous().t()
    found = not_fused(model)
    assert found.keys() == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert "torch.bfloat16" in found["model.layers.0.mlp"]


def test_hooks_around_a_layer_leave_it_alone(device: str) -> None:
    model = source("llama", device)
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    assert list(fused(model)) == [model.model.layers[1]]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt2", "phi3"])
def test_other_families_stay_as_they_are(family: str) -> None:
    assert not fused(tiny_source(family))


def test_generate_uses_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sse_convert.inference import cuda_graphs

    model, used = hybrid(DECAYED, device), []
    call = FusedLayer.__call__
    monkeypatch.setattr(FusedLayer, "__call__", lambda self, *a, **b: (used.append(self), call(self, *a, **b))[1])
    monkeypatch.setattr(cuda_graphs, "runs_graphs", lambda model: True)
    monkeypatch.setattr(generation, "_around", [])  # a GPU would replay the expected steps as well
    ids = prompts((7,))[0].to(device)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(ids, **options)
    assert not used
    with graphed(model, 20):
        assert torch.equal(model.generate(ids, **options), expected)
    assert used


def test_projections_know_their_classes() -> None:
    """A class of ours derived from a known one is not the known one."""

    class More(NewProjection): ...

    model = hybrid(DECAYED, "cpu")
    model.model.layers[0].self_attn.sse_delta_q_down.__class__ = More
    assert "More" in not_fused(model)["model.layers.0.self_attn"]
