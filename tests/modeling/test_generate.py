"""Generation with a cache computes what a full forward computes."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from sse_convert.errors import UsageError
from tests.covering import arguments
from tests.modeling.tiny import (
    BASELINES,
    BESIDE,
    ENTRIES,
    FAMILIES,
    HEADS,
    LAYOUT,
    PAD,
    exact,
    prompts,
    tiny_model,
    tiny_source,
)

NEW = 7
"""tokens: more than any window of these models holds"""
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
DEEP = (("qwen3", LAYOUT), ("gemma3_text", LAYOUT), ("gpt2", LAYOUT), ("qwen3", BASELINES), ("qwen3", HEADS))
MAIN = ("qwen3", "llama", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2")


def rows(ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    return [ids[row, mask[row].bool()][None] for row in range(len(ids))]


@torch.no_grad()
def greedy_by_full_forward(
    model: PreTrainedModel, row: torch.Tensor, new: int = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [new] and logits [new, vocab], each from a forward over the whole text without cache."""
    logits = []
    for _ in range(new):
        logits.append(model(row, use_cache=False).logits[0, -1])
        row = torch.cat([row, logits[-1].argmax()[None, None]], 1)
    return row[0, -new:], torch.stack(logits)


@torch.no_grad()
def greedy_with_cache(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, new: int = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows, new] and logits [rows, new, vocab], one token at a time after the prompt."""
    cache = DynamicCache(config=model.config)
    logits, tokens, step = [], [], ids
    position = (mask.cumsum(1) - 1).clamp_min(0)
    for _ in range(new):
        logits.append(model(step, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1])
        step = logits[-1].argmax(-1)[:, None]
        tokens.append(step)
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        position = mask.sum(1, keepdim=True) - 1
    return torch.cat(tokens, 1), torch.stack(logits, 1)


@pytest.fixture(
    scope="module",
    params=[*((name, LAYOUT) for name in FAMILIES), *((name, BESIDE) for name in MAIN), ("llama", BASELINES)],
    ids=str,
)
def family(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = tiny_model(*request.param, dtype=torch.float64)
    return model, [greedy_by_full_forward(model, row) for row in rows(*prompts())]


@cache
def deep_of(model_type: str, layers: tuple[str, ...]) -> tuple[PreTrainedModel, torch.Tensor]:
    model = tiny_model(model_type, layers, dtype=torch.float64)
    return model, torch.stack([greedy_by_full_forward(model, row)[0] for row in rows(*prompts())])


@pytest.fixture(params=DEEP, ids=str)
def deep(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, torch.Tensor]:
    """A model, which all tests share, and what it says."""
    return deep_of(*request.param)


def test_cached_left_padded_batch_equals_full_forward_of_single_rows(family) -> None:
    model, expected = family
    tokens, logits = greedy_with_cache(model, *prompts())
    for row, (want_tokens, want_logits) in enumerate(expected):
        assert torch.equal(tokens[row], want_tokens)
        torch.testing.assert_close(logits[row], want_logits, **exact(model.config.model_type))
    assert len(tokens.unique()) > 1


def test_generate_is_greedy(family) -> None:
    model, expected = family
    ids, mask = prompts()
    out = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, (tokens, _) in enumerate(expected):
        assert torch.equal(out[row, -NEW:], tokens)


@pytest.mark.parametrize("model_type", ENTRIES)
def test_no_converted_layer_is_the_source_to_the_bit(model_type: str) -> None:
    source, hybrid = tiny_source(model_type), tiny_model(model_type, ("full",) * 4)
    assert {k: v.shape for k, v in hybrid.state_dict().items()} == {k: v.shape for k, v in source.state_dict().items()}
    ids, mask = prompts()
    with torch.no_grad():
        assert torch.equal(hybrid(ids, attention_mask=mask).logits, source(ids, attention_mask=mask).logits)
    options = {**GREEDY, "max_new_tokens": 2, "attention_mask": mask}
    assert torch.equal(hybrid.generate(ids, **options), source.generate(ids, **options))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_right_padding_changes_nothing(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.float64)
    ids, mask = prompts(side="right")
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for row, alone in enumerate(rows(ids, mask)):
            torch.testing.assert_close(together[row, : alone.shape[1]], model(alone).logits[0], **exact(model_type))


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_cache_modes_give_the_same_tokens(deep, options) -> None:
    model, expected = deep
    ids, mask = prompts()
    assert torch.equal(model.generate(ids, attention_mask=mask, **options, **GREEDY)[:, -NEW:], expected)


def test_cache_without_configuration(deep) -> None:
    model, expected = deep
    ids, mask = prompts()
    out = model.generate(ids, attention_mask=mask, past_key_values=DynamicCache(), **GREEDY)
    assert torch.equal(out[:, -NEW:], expected)


def test_a_cache_is_continued(deep) -> None:
    model, expected = deep
    ids, mask = prompts()
    cache = DynamicCache(config=model.config)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 4})
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    rest = {**GREEDY, "max_new_tokens": NEW - 4}
    assert torch.equal(model.generate(first, attention_mask=mask, past_key_values=cache, **rest)[:, -NEW:], expected)


BEAMS_AND_SAMPLES = {
    "deep": DEEP,
    "options": (
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ),
    "static": (False, True),
}


@pytest.mark.parametrize(("deep", "options", "static"), arguments(BEAMS_AND_SAMPLES), indirect=["deep"], ids=str)
def test_beams_and_samples_equal_those_without_cache(deep, options, static: bool) -> None:
    model, _ = deep
    ids, mask = prompts()
    found = []
    for cached in ({"use_cache": False}, {"cache_implementation": "static"} if static else {}):
        torch.manual_seed(0)
        found.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=PAD, **options, **cached)
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("draft", ["another model", "nearly the same", "prompt lookup"])
def test_assisted_decoding_takes_rejected_tokens_back(deep, draft: str) -> None:
    model, expected = deep
    ids, mask = prompts()
    options = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    if draft != "prompt lookup":
        seed = 5 if draft == "another model" else 0
        sse = model.config.sse
        assistant = tiny_model(sse["source_model_type"], tuple(sse["layers"]), dtype=torch.float64, seed=seed)
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter.add_(0.003 * torch.randn_like(parameter))
        options = {"assistant_model": assistant}
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    out = model.generate(ids[:1], attention_mask=mask[:1], **options, **GREEDY)
    hook.remove()
    assert torch.equal(out[0, -NEW:], expected[0])
    assert draft != "nearly the same" or len(calls) < NEW


@pytest.mark.parametrize(("model_type", "layers"), [("llama", LAYOUT), ("qwen3", HEADS), ("llama", BASELINES)])
def test_a_draft_by_the_first_layers_gives_the_same_tokens(model_type: str, layers: tuple[str, ...]) -> None:
    model = tiny_model(model_type, layers, dtype=torch.float64)
    ids, mask = prompts((11,))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    found = model.generate(ids, attention_mask=mask, assistant_early_exit=2, **GREEDY)
    assert torch.equal(found, expected)
    assert model.config.num_hidden_layers == 4
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)


@pytest.mark.parametrize("layers", [LAYOUT, HEADS], ids=str)
def test_continuous_batching_is_refused_at_its_start(layers: tuple[str, ...]) -> None:
    model = tiny_model("qwen3", layers)
    ids, _ = prompts((7,))
    with pytest.raises(UsageError, match="continuous batching"):
        model.generate_batch(ids.tolist())
    with pytest.raises(UsageError, match="continuous batching"):
        model.generate(ids, cache_implementation="paged", **GREEDY)
    assert model.config._attn_implementation == "sdpa"
