"""Training: checkpointing, the balance loss and bias, router health, copies."""

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.errors import HardwareError, UsageError
from sse_convert.kernels.routing import balance_loss, route
from sse_convert.modeling.loading import refuse_parallel_plan
from tests.modeling.tiny import BASELINES, BESIDE, HEADS, LAYOUT, MIXERS, SSE, prompts, tiny_model

FLAT = {
    "sse": {**SSE, "balance": "none"},
    "delta": {**SSE, "update": "delta", "k_feature_map": "l2", "balance": "none"},
    "mixed": {**MIXERS["mixed"], "balance": "none"},
    "sse+sliding": {**MIXERS["sse+sliding"], "balance": "none"},
    "sse+sliding@0": {**MIXERS["sse+sliding@0"], "balance": "none"},
}


def loss_and_gradients(model: PreTrainedModel, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids, mask = prompts()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def checkpoint(model: PreTrainedModel, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that all supported versions of transformers know
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        *((name, LAYOUT) for name in ("llama", "gemma3_text", "gpt_neox", "gpt2")),
        ("llama", BASELINES),
        ("phi3", HEADS),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(model_type: str, layers: tuple[str, ...], reentrant: bool) -> None:
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if model_type == "gpt2" else {}
    mixers = FLAT if reentrant else None
    model = tiny_model(model_type, layers, mixers, dtype=torch.float64, **no_dropout).train()
    loss, gradients = loss_and_gradients(model)
    checkpoint(model, reentrant)
    again, recomputed = loss_and_gradients(model)
    torch.testing.assert_close(again, loss, atol=1e-12, rtol=0)
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-11, rtol=1e-9, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_no_second_forward_to_the_router(reentrant: bool) -> None:
    """What a layer remembers is the forward's routing, once; not the repetition's, whose graph would stay alive."""
    model = tiny_model("llama", ("sse", "full", "full", "full"), FLAT if reentrant else None).train()
    layer, (ids, mask) = model.sse_layers()[0], prompts()
    checkpoint(model, reentrant)
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    remembered = layer.trace.logits_TN
    loss.backward()
    assert layer.trace.logits_TN is remembered


def test_reentrant_checkpointing_refuses_to_lose_the_balance_loss() -> None:
    model = tiny_model("llama").train()
    checkpoint(model, reentrant=True)
    with pytest.raises(UsageError, match="no gradient under reentrant gradient checkpointing"):
        loss_and_gradients(model)


def test_training_loss_includes_the_balance_loss() -> None:
    model = tiny_model("qwen3", dtype=torch.float64).train()
    ids, mask = prompts()
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels)
    layers = model.sse_layers()
    assert list(layers) == [0, 2]
    expected = torch.stack([balance_loss(route(layer.trace.logits_TN, 1)) for layer in layers.values()]).mean()
    torch.testing.assert_close(model.sse_balance_loss(), 0.01 * expected)
    as_tuple = model(ids, attention_mask=mask, labels=labels, return_dict=False)[0]
    assert torch.equal(as_tuple, out.loss)
    assert all(layer.trace.logits_TN.shape == (int(mask.sum()), 4) for layer in layers.values())
    model.eval()
    plain = model(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(out.loss - plain, 0.01 * expected, atol=1e-12, rtol=0)


def own_loss(model: PreTrainedModel, *, asks: bool = False) -> None:
    """A step of a trainer that computes the loss itself."""
    loss = model(prompts()[0]).logits.logsumexp(-1).sum()
    (loss + model.sse_balance_loss() if asks else loss).backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_balance_loss_that_nobody_asks_for_is_warned_of(checkpointed: bool) -> None:
    model = tiny_model("llama").train()
    if checkpointed:
        checkpoint(model, reentrant=False)
    own_loss(model)
    with pytest.warns(UserWarning, match="left the routers' balance loss out"):
        own_loss(model)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_is_said_where_it_is_asked_for_or_there_is_none(
    checkpointed: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = tiny_model("llama").train()
    if checkpointed:
        checkpoint(model, reentrant=False)
    ids, _ = prompts()
    for _ in range(2):
        own_loss(model, asks=True)
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(ids)
    other = tiny_model("llama", mixers=FLAT).train()
    own_loss(other)
    own_loss(other)
    assert not [warning for warning in recwarn if "balance loss" in str(warning.message)]


def test_the_balance_loss_reaches_the_router_alone() -> None:
    model = tiny_model("qwen3", ("full", "full", "full", "sse")).train()
    model(prompts((20,))[0])
    model.sse_balance_loss().backward()
    layer = model.sse_layers()[3]
    assert layer.sse_router.weight.grad.abs().max() > 0
    assert layer.q_proj.weight.grad is None


@pytest.mark.parametrize("mixers", [FLAT, *({"sse": {"kind": kind}} for kind in ("gla", "gdn"))], ids=str)
def test_layers_without_balance_loss_add_nothing(mixers: dict[str, Any]) -> None:
    model = tiny_model("llama", mixers=mixers).train()
    ids = prompts((9,))[0]
    loss = model(ids, labels=ids).loss
    assert model.sse_balance_loss() == 0
    plain = model.eval()(ids, labels=ids, use_cache=False).loss
    assert bool(plain == loss)


@pytest.mark.parametrize("mixer", ["sse", "delta"])
@pytest.mark.parametrize("gate", [{"write": True, "read": False}, {"write": False, "read": True}], ids=str)
def test_the_task_loss_reaches_the_router(mixer: str, gate: dict[str, bool]) -> None:
    """Through either gate alone; keys of unit norm do not cancel it."""
    settings = {mixer: {**FLAT[mixer], "gate": gate}}
    model = tiny_model("llama", (mixer, "full", "full", "full"), settings, dtype=torch.float64).train()
    _, gradients = loss_and_gradients(model)
    router, others = "model.layers.0.self_attn.sse_router.weight", "model.layers.0.self_attn.q_proj.weight"
    assert gradients[router].norm() > 1e-2 * gradients[others].norm()


def test_router_stats() -> None:
    model = tiny_model("llama", ("sse", "full", "full", "gla"), {"gla": {"kind": "gla"}})
    assert model.sse_router_stats() == {}
    ids, mask = prompts()
    model(ids, attention_mask=mask)
    stats = model.sse_router_stats()
    assert list(stats) == [0]
    routing = route(model.sse_layers()[0].trace.logits_TN, 1)
    share = torch.bincount(routing.used_TK.flatten(), minlength=4) / int(mask.sum())
    torch.testing.assert_close(stats[0]["load"], share)
    entropy = -sum(float(p) * float(p.log()) for p in share if p > 0)
    assert stats[0]["entropy"] == pytest.approx(entropy, abs=1e-6)
    assert stats[0]["gate_mean"] == pytest.approx(routing.gate_TN.max(-1).values.mean().item())
    assert not stats[0]["load"].requires_grad


@pytest.mark.parametrize(("model_type", "layers"), [("qwen3", LAYOUT), ("deepseek_v3", BESIDE)], ids=str)
def test_copies_and_pickles_of_a_trained_model(model_type: str, layers: tuple[str, ...]) -> None:
    model = tiny_model(model_type, layers).train()
    loss_and_gradients(model)
    ids = prompts((6,))[0]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is type(model)
            assert torch.equal(other(ids).logits, expected)


def test_hidden_states_and_attentions_are_recorded() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    out = model(prompts()[0], output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 5
    assert len(out.attentions) == 2


def test_resized_embeddings() -> None:
    model = tiny_model("qwen3")
    model.resize_token_embeddings(110)
    assert model.config.vocab_size == 110
    assert model(prompts()[0]).logits.shape[-1] == 110


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_plan": "auto"}, "tensor parallelism of a model with converted layers .tp_plan='auto'"),
        ({"tp_size": 2}, "tensor parallelism .* .tp_size=2"),
        ({"device_mesh": SimpleNamespace(mesh_dim_names=("dp", "cp"))}, "context parallelism"),
        ({"device_mesh": SimpleNamespace(mesh_dim_names=None)}, "tensor parallelism"),
        ({"distributed_config": SimpleNamespace(tp_plan="auto", tp_size=None)}, "tensor parallelism"),
    ],
    ids=str,
)
def test_parallel_loading_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        type(tiny_model("llama")).from_pretrained("nowhere", **arguments)


@pytest.mark.parametrize(("mode", "name"), [("tp", "tensor"), ("cp", "context"), ("sp", "sequence")])
def test_parallel_plans_are_refused(mode: str, name: str) -> None:
    plan = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, f"{mode}_size": 2})
    with pytest.raises(HardwareError, match=f"{name} parallelism"):
        refuse_parallel_plan(plan)
    refuse_parallel_plan(SimpleNamespace(tp_size=1, cp_size=1, sp_size=1, dp_shard_size=8))


def test_parallel_meshes_are_refused_at_run_time() -> None:
    model = tiny_model("llama")
    ids = prompts()[0]
    weight = next(model.sse_layers()[0].parameters())
    weight.device_mesh = SimpleNamespace(mesh_dim_names=("dp_shard",))
    model(ids)
    weight.device_mesh = SimpleNamespace(mesh_dim_names=("dp_shard_cp",))
    with pytest.raises(HardwareError, match="context parallelism"):
        model(ids)
    assert model.supports_context_parallel is False
