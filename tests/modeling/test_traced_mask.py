"""torch.compile(fullgraph=True) and torch.export take an attention mask, and compute under any mask what eager does."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.modeling.tiny import prompts, tiny_model

STATES, WINDOWS, DELTA = ("sse", "full"), ("sse+sliding", "sliding"), ("gdn", "delta")
MASKS = {"left": prompts((11, 7)), "right": prompts((11, 7), "right"), "none": prompts((11, 11))}
HOLES = MASKS["left"][1] * torch.tensor([1, 0] + [1] * 9)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def model_of(layers: tuple[str, ...]) -> PreTrainedModel:
    return tiny_model("qwen3", layers, dtype=torch.float64, num_hidden_layers=2)


@pytest.mark.parametrize("layers", [STATES, WINDOWS], ids=str)
@torch.no_grad()
def test_one_graph_serves_every_mask(layers: tuple[str, ...]) -> None:
    model = model_of(layers)
    whole = torch.compile(model, fullgraph=True, backend="eager")
    for ids, mask in (*MASKS.values(), (MASKS["left"][0], HOLES)):
        found = whole(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-10, rtol=0)


@pytest.mark.parametrize("layers", [WINDOWS, DELTA], ids=str)
@torch.no_grad()
def test_an_exported_program_takes_other_masks(layers: tuple[str, ...]) -> None:
    model = model_of(layers)
    ids, mask = MASKS["none"]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False).module()
    for ids, mask in (*MASKS.values(), (MASKS["left"][0], HOLES)):
        found = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-10, rtol=0)


def test_padding_counts_for_no_loss_gradient_or_load() -> None:
    model = model_of(WINDOWS).train()
    ids, mask = MASKS["left"]
    labels = ids.masked_fill(mask == 0, -100)

    def step(run: object) -> dict[str, Tensor]:
        model.zero_grad()
        loss = run(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss  # type: ignore[operator]
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **gradients}

    expected = step(model)
    stats = model.sse_router_stats()
    found = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-10, rtol=1e-8, msg=name)
    for index, layer in model.sse_router_stats().items():
        torch.testing.assert_close(layer, stats[index], atol=1e-10, rtol=1e-8)


@torch.no_grad()
def test_a_compiled_prefill_fills_the_cache() -> None:
    model = model_of(WINDOWS)
    ids, mask = MASKS["left"]
    logits = []
    for run in (model, torch.compile(model, backend="eager")):
        cache = DynamicCache(config=model.config)
        run(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], past_key_values=cache)
        logits.append(model(ids[:, -2:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-10, rtol=0)
