"""One-token steps with a static cache: equal to those with a dynamic one, and compiled whole."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import CompileConfig

from tests.modeling.tiny import PAD, prompts, tiny_model

SLOTS = 32
STEPS = 3
CLOSE = {"atol": 1e-10, "rtol": 0}


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", ("sse+sliding", "sliding", "mixed", "full")),
        ("gpt2", ("sse", "sliding")),
    ],
    ids=str,
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Every kind of layer, absolute positions and rotated ones."""
    model_type, layers = request.param
    return tiny_model(model_type, layers, dtype=torch.float64, num_hidden_layers=len(layers))


@torch.no_grad()
def steps(model: PreTrainedModel, forward, cache, lengths: tuple[int, ...], mask_columns: int | None) -> Tensor:
    """Logits [rows, STEPS, vocab] of fixed tokens after left-padded prompts; the step's mask is 0, SLOTS or as wide as
    the text."""
    ids, mask = prompts(lengths)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    padded = mask_columns != 0
    model(ids, attention_mask=mask if padded else None, position_ids=position, past_key_values=cache)
    logits = []
    for step in range(STEPS):
        position = position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        wide = torch.zeros(len(lengths), SLOTS, dtype=mask.dtype)
        wide[:, : mask.shape[1]] = mask
        token = torch.full((len(lengths), 1), 5 + step)
        given = None if not padded else wide if mask_columns == SLOTS else mask
        logits.append(
            forward(
                input_ids=token, attention_mask=given, position_ids=position, past_key_values=cache, use_cache=True
            ).logits
        )
    return torch.cat(logits, 1)


def static(model: PreTrainedModel) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=SLOTS)


@pytest.mark.parametrize("mask_columns", [None, SLOTS, 0], ids=["mask so far", "mask of all slots", "no mask"])
def test_a_static_cache_steps_like_a_dynamic_one(model: PreTrainedModel, mask_columns: int | None) -> None:
    lengths = (9, 9) if mask_columns == 0 else (9, 6)
    expected = steps(model, model, DynamicCache(config=model.config), lengths, None)
    torch.testing.assert_close(steps(model, model, static(model), lengths, mask_columns), expected, **CLOSE)


def test_a_step_compiles_to_one_graph(model: PreTrainedModel) -> None:
    """Padded, but for one of the models."""
    mask_columns, lengths = (0, (9, 9)) if model.config.model_type == "sse_gpt2" else (SLOTS, (9, 6))
    expected = steps(model, model, DynamicCache(config=model.config), lengths, None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(steps(model, compiled, static(model), lengths, mask_columns), expected, **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_generate_compiles_the_steps_of_a_static_cache() -> None:
    model = tiny_model("qwen3", ("sse+sliding", "full"), dtype=torch.float64, num_hidden_layers=2)
    ids, mask = prompts((9, 6))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    plain = model.generate(ids, attention_mask=mask, **options)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=False)
    compile_config._compile_all_devices = True
    config = GenerationConfig(
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=PAD,
        cache_implementation="static",
        compile_config=compile_config,
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(ids, attention_mask=mask, generation_config=config), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
