"""The SSE layer: the paper's equations, every knob, gradients, padding."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import row_layout
from sse_convert.modeling.tensors import new_tensors
from tests.modeling.tiny import HEADS, LAYOUT, SSE, prompts, tiny_model, tiny_source

ONE = ("sse", "full", "full", "sse")
KNOBS: dict[str, dict[str, Any]] = {
    "paper": {},
    "N=1": {"num_partitions": 1},
    "k=N": {"num_partitions": 3, "top_k": 3},
    "k=2": {"top_k": 2},
    "no write gate": {"gate": {"write": False, "read": True}},
    "no read gate": {"gate": {"write": True, "read": False}},
    "no gate": {"gate": {"write": False, "read": False}, "balance": "none"},
    "silu": {"k_feature_map": "silu"},
    "relu": {"k_feature_map": "relu"},
    "identity": {"k_feature_map": "identity"},
    "no shared": {"shared_partition": False, "qk_rank": 0},
    "no side path": {"qk_rank": 0},
    "scalar decay": {"decay": "scalar"},
    "separate decays": {"decay_params": "separate"},
    "separate scalar decays": {"decay_params": "separate", "decay": "scalar"},
    "query heads": {"state_heads": "query"},
    "l2": {"k_feature_map": "l2"},
    "delta": {"update": "delta", "k_feature_map": "l2"},
    "delta, separate": {"update": "delta", "decay_params": "separate", "top_k": 2},
    "gla": {"kind": "gla"},
    "gla, query heads": {"kind": "gla", "state_heads": "query"},
    "gdn": {"kind": "gdn"},
    "gdn, query heads": {"kind": "gdn", "state_heads": "query"},
}


def one_mixer(knobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    base = SSE if knobs.get("kind", "sse") == "sse" else {}
    return {"sse": {**base, **knobs}}


def model_with(knobs: dict[str, Any], model_type: str = "qwen3", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(model_type, ONE, one_mixer(knobs), dtype=dtype)


def by_the_paper(layer: SSEAttention, x: Tensor) -> Tensor:
    """One row x [T, hidden] through the default layer of Qwen3, equation by equation, token by token."""
    queries, heads, D, N = 4, 2, 8, 4
    states = torch.zeros(N + 1, heads, D, D, dtype=x.dtype)
    outputs = []
    for token in x:
        q = layer.q_norm(layer.q_proj(token).view(queries, D))
        k = layer.k_norm(layer.k_proj(token).view(heads, D))
        v = layer.v_proj(token).view(heads, D)
        side_q = layer.sse_delta_q_up(layer.sse_delta_q_down(token))
        side_k = layer.sse_delta_k_up(layer.sse_delta_k_down(token))
        shared_q = layer.q_norm((layer.q_proj(token) + side_q).view(queries, D))
        shared_k = layer.k_norm((layer.k_proj(token) + side_k).view(heads, D))
        phi, shared_phi = (torch.softmax(key * layer.sse_k_scale[:, None], -1) for key in (k, shared_k))
        decay = torch.sigmoid(layer.sse_decay_up(layer.sse_decay_down(token))).view(heads, D) ** (1 / 16)
        e = torch.softmax(layer.sse_router(token), -1)
        best = int(e.argmax())
        states[best] = decay[..., None] * states[best] + e[best] * phi[..., None] * v[:, None]
        states[N] = decay[..., None] * states[N] + shared_phi[..., None] * v[:, None]
        o = torch.stack([
            (e[best] * q[h] @ states[best, h // 2] + shared_q[h] @ states[N, h // 2]) / math.sqrt(D)
            for h in range(queries)
        ])  # fmt: skip
        o = o / o.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        outputs.append(layer.o_proj(o.flatten() * layer.sse_out_scale))
    return torch.stack(outputs)


@torch.no_grad()
def test_default_layer_is_the_papers_equations() -> None:
    layer = model_with({}).sse_layers()[0]
    x = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    out, weights = layer(x, sse_layout=row_layout(2, 13, None))
    assert weights is None
    for row in range(2):
        torch.testing.assert_close(out[row], by_the_paper(layer, x[row]), atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", KNOBS)
@torch.no_grad()
def test_pieces_with_a_cache_and_padding_equal_single_rows(name: str) -> None:
    model = model_with(KNOBS[name])
    ids, mask = prompts((12, 7))
    cache, logits, position = DynamicCache(config=model.config), [], (mask.cumsum(1) - 1).clamp_min(0)
    for start, stop in ((0, 4), (4, 5), (5, 11), (11, 12)):
        part = slice(start, stop)
        logits.append(
            model(
                ids[:, part], attention_mask=mask[:, :stop], position_ids=position[:, part], past_key_values=cache
            ).logits
        )
    pieces = torch.cat(logits, 1)
    for row in range(2):
        alone = model(ids[row, mask[row].bool()][None]).logits[0]
        torch.testing.assert_close(pieces[row, mask[row].bool()], alone, atol=1e-9, rtol=0)
    for index, layer in model.sse_layers().items():
        assert cache.layers[index].state.shape[:2] == (2, layer.mixer.num_partitions + layer.mixer.shared_partition)


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_every_new_parameter_gets_a_gradient(name: str, model_type: str) -> None:
    model = model_with(KNOBS[name], model_type).train()
    ids, mask = prompts()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", KNOBS)
def test_new_tensors_are_those_of_the_table(name: str) -> None:
    layer = model_with(KNOBS[name]).sse_layers()[0]
    table = {spec.name: spec.shape for spec in new_tensors(layer.dims, layer.mixer)}
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items() if "sse_" in k} == table
    assert not [name for name, _ in layer.named_buffers() if "sse_" in name]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt_neox", "gpt2", "olmo2"])
def test_state_dict_keeps_the_sources_keys(model_type: str) -> None:
    source = tiny_source(model_type).state_dict()
    added = tiny_model(model_type, ("sse",) * 4).state_dict().keys() - source.keys()
    assert all(".sse_" in key for key in added)
    assert len(added) == 4 * len(new_tensors(*_dims(model_type)))


def _dims(model_type: str) -> tuple[Any, Any]:
    layer = tiny_model(model_type, ("sse",) * 4).sse_layers()[0]
    return layer.dims, layer.mixer


def test_what_both_kinds_of_partition_need_is_computed_once() -> None:
    x = torch.randn(5, 32, dtype=torch.float64)
    inputs = model_with(KNOBS["no side path"]).sse_layers()[0].operator_inputs(x)
    for given, name in zip(inputs["shared"], ("q", "k", "log_decay"), strict=True):
        assert given is inputs[name]
    inputs = model_with({}).sse_layers()[0].operator_inputs(x)
    assert inputs["shared"][2] is inputs["log_decay"]
    assert not torch.equal(inputs["shared"][0], inputs["q"])


def test_a_single_partition_has_no_gate() -> None:
    """Which is 1: nothing multiplies by it, and no gradient of it is summed up."""
    gated = {n: next(iter(model_with({"num_partitions": n, "top_k": 1}).sse_layers().values())) for n in (1, 2)}
    options = {n: layer.routing_options() for n, layer in gated.items()}
    assert (options[1]["write_gate"], options[1]["read_gate"]) == (False, False)
    assert (options[2]["write_gate"], options[2]["read_gate"]) == (True, True)


def test_a_layer_without_layout_refuses() -> None:
    layer = model_with({}).sse_layers()[3]
    with pytest.raises(UsageError, match="layer 3 received no sse_layout"):
        layer(torch.zeros(1, 2, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("sse", "message"),
    [
        ({"layers": ["full"] * 3}, "names 3 layers, the model has 4"),
        ({"layers": ["full"] * 3 + ["nope"]}, "'nope'"),
        ({"mixers": {"sse": {"kind": "mamba"}}}, "mixer kind is 'mamba'"),
        ({"format": 3}, "has format 3, expected 2"),
        ({"source_model_type": "llama"}, "has source_model_type 'llama', expected 'qwen3'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(sse: dict[str, Any], message: str) -> None:
    config = tiny_model("qwen3").config
    with pytest.raises(CheckpointError, match=message):
        type(config)(**{**config.to_dict(), "sse": {**config.sse, **sse}})


@pytest.mark.parametrize("layers", [LAYOUT, HEADS], ids=str)
def test_hooks_that_rebuild_containers_change_nothing(layers: tuple[str, ...]) -> None:
    """Tools for quantisation hand every module its arguments with their tuples made anew."""
    model = tiny_model("qwen3", layers)
    ids, mask = prompts((20, 13))
    expected = model(ids, attention_mask=mask).logits

    def rebuilt(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(rebuilt(part) for part in value)
        if isinstance(value, dict):
            return {name: rebuilt(part) for name, part in value.items()}
        return value

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return rebuilt(args), rebuilt(kwargs)

    for module in model.modules():
        module.register_forward_pre_hook(hook, with_kwargs=True)
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)
