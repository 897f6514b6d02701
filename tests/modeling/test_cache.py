"""The cache layers of converted models: rolling back, moving rows, installing."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from sse_convert.errors import UsageError
from sse_convert.evaluation.throughput import allocated_cache_bytes
from sse_convert.modeling.state_cache import SSECacheLayer
from sse_convert.modeling.window_cache import SlidingCacheLayer
from tests.modeling.tiny import BASELINES, HEADS, LAYOUT, prompts, tiny_model

LENGTHS = (14, 5, 9)
CLOSE = {"atol": 1e-10, "rtol": 0}


BOTH = pytest.mark.parametrize("model", [LAYOUT, BASELINES, HEADS], indirect=True, ids=str)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("qwen3", getattr(request, "param", LAYOUT), dtype=torch.float64)


@torch.no_grad()
def forward(
    model: PreTrainedModel, cache: DynamicCache | None, start: int, stop: int, ids: Tensor | None = None
) -> Tensor:
    """Logits of columns start to stop of the left-padded prompts."""
    given, mask = prompts(LENGTHS)
    ids = given if ids is None else ids
    position = (mask.cumsum(1) - 1).clamp_min(0)
    return model(
        ids[:, start:stop],
        attention_mask=mask[:, :stop],
        position_ids=position[:, start:stop],
        past_key_values=cache,
    ).logits


@BOTH
@pytest.mark.parametrize("pieces", [[(4, 14)], [(4, 9), (9, 10), (10, 14)], [(0, 14)]], ids=str)
@pytest.mark.parametrize("removed", [1, 4, 5, 9])
def test_crop_takes_tokens_back_from_all_layers(model: PreTrainedModel, pieces, removed: int) -> None:
    cache = DynamicCache(config=model.config)
    model.model.sse_install(cache)
    if pieces[0][0]:
        forward(model, cache, 0, pieces[0][0])
        cache.crop(0)
    cache.activate_past_recording()
    wrong = torch.randint(3, 97, (3, 14), generator=torch.Generator().manual_seed(4))
    wrong[:, : 14 - removed] = prompts(LENGTHS)[0][:, : 14 - removed]
    for start, stop in pieces:
        forward(model, cache, start, stop, wrong)
    cache.crop(-removed)
    assert {layer.get_seq_length() for layer in cache.layers} == {14 - removed}
    again = forward(model, cache, 14 - removed, 14)
    expected = forward(model, DynamicCache(config=model.config), 0, 14)[:, 14 - removed :]
    real = prompts(LENGTHS)[1][:, 14 - removed :].bool()
    torch.testing.assert_close(again[real], expected[real], **CLOSE)
    cache.crop(0)
    with pytest.raises(UsageError, match=r"crop\(-2\) after 0 recorded tokens"):
        cache.crop(-2)


@BOTH
def test_crop_takes_a_count_that_is_a_tensor(model: PreTrainedModel) -> None:
    """Assisted generation counts drafts in a tensor on the model's device; lengths stay ints, on no device."""
    cache = DynamicCache(config=model.config)
    model.model.sse_install(cache)
    cache.activate_past_recording()
    forward(model, cache, 0, 14)
    cache.crop(-torch.tensor(3))
    assert [layer.get_seq_length() for layer in cache.layers] == [11] * len(cache.layers)
    converted = [layer for layer in cache.layers if isinstance(layer, SSECacheLayer | SlidingCacheLayer)]
    assert converted
    assert {type(layer.get_seq_length()) for layer in converted} == {int}


def test_crop_without_recording_is_refused(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    forward(model, cache, 0, 6)
    with pytest.raises(UsageError, match="does not record its past"):
        cache.crop(-1)
    with pytest.raises(UsageError, match=r"crop\(3\)"):
        cache.layers[0].crop(3)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_rows_are_reordered_repeated_and_selected(model: PreTrainedModel, kind: str) -> None:
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)
    ids, mask = prompts((9, 6))
    model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=cache)
    order = torch.tensor([1, 0, 0])
    if kind == "dynamic":
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([2, 1, 0]))
    else:
        cache.reorder_cache(order)
    mask = torch.cat([mask[order], torch.ones(3, 1, dtype=torch.long)], 1)
    step = torch.tensor([[5], [6], [7]])
    position = mask.sum(1, keepdim=True) - 1
    logits = model(step, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1]
    for row, source in enumerate(order.tolist()):
        alone = torch.cat([ids[source, mask[row, :-1].bool()], step[row]])[None]
        torch.testing.assert_close(logits[row], model(alone, use_cache=False).logits[0, -1], **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_reset_cache_is_fresh(kind: str) -> None:
    """All layers converted: transformers 5.17 resets its own dynamic layers to zeros that are still attended to."""
    model = tiny_model("qwen3", ("sse", "sliding", "sse", "sliding"), dtype=torch.float64)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)
    ids = prompts((11,))[0]
    model(ids.flip(1), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits, **CLOSE)


@torch.no_grad()
def test_a_copied_cache_goes_its_own_way(model: PreTrainedModel) -> None:
    ids = prompts((11,))[0]
    cache = DynamicCache(config=model.config)
    model(ids[:, :7], past_key_values=cache)
    other = copy.deepcopy(cache)
    model(ids[:, :4], past_key_values=other)
    logits = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, 7:], **CLOSE)


@torch.no_grad()
def test_layers_are_installed_once_by_kind(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    model(prompts((5,))[0], past_key_values=cache)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[:3] == [SSECacheLayer, SlidingCacheLayer, SSECacheLayer]
    layers = list(cache.layers)
    model(prompts((1,))[0], past_key_values=cache)
    assert all(a is b for a, b in zip(layers, cache.layers, strict=True))
    assert cache.layers[0].state.shape == (1, 5, 2, 8, 8)
    assert cache.get_seq_length() == 6


def test_unsuitable_caches_are_refused(model: PreTrainedModel) -> None:
    ids = prompts((5,))[0]
    plain = tiny_model("qwen3", ("full",) * 4, dtype=torch.float64)
    cache = plain(ids, use_cache=True).past_key_values
    with pytest.raises(UsageError, match="already holds keys of layer 0"):
        model(ids, past_key_values=cache)
    with pytest.raises(UsageError, match="past_key_values is a tuple"):
        model.model.sse_install(((ids, ids),))


@torch.no_grad()
def test_a_window_frees_the_prompt_that_it_has_left() -> None:
    """What a prefill leaves in memory is the window and the sinks, not a view into all keys of the prompt."""
    model = tiny_model("llama", ("sliding", "sse+sliding") * 2)
    held = []
    for length in (40, 120):
        cache = DynamicCache(config=model.config)
        model(prompts((length,))[0], past_key_values=cache)
        held.append(allocated_cache_bytes(cache))
    assert held[0] == held[1]
