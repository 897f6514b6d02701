"""Windows with sinks: who influences whom, in training and with every kind of cache."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from sse_convert.errors import UsageError
from sse_convert.modeling.window_cache import SlidingCacheLayer
from tests.modeling.tiny import FAMILIES, PAD, VOCAB, prompts, tiny_model

ALL = ("sliding",) * 4
ONE = ("sliding", "full", "full", "full")


def window(size: int, sinks: int) -> dict[str, dict[str, int | str]]:
    return {"sliding": {"kind": "sliding", "window": size, "sinks": sinks}}


@torch.no_grad()
def influenced(model: PreTrainedModel, length: int, token: int, **inputs: Tensor) -> list[int]:
    """Positions whose logits change, by a single bit, when one token changes."""
    ids = prompts((length,))[0]
    other = ids.clone()
    other[0, token] = (other[0, token] + 1 - 3) % (VOCAB - 3) + 3
    changed = (model(ids, use_cache=False, **inputs).logits != model(other, use_cache=False, **inputs).logits)[0].any(
        -1
    )
    return changed.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_token_reaches_as_far_as_the_windows(model_type: str) -> None:
    model = tiny_model(model_type, ALL, window(3, 0), dtype=torch.float64)
    assert influenced(model, 20, 5) == list(range(5, 5 + 4 * 2 + 1))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_sinks_are_seen_by_all_later_tokens(model_type: str) -> None:
    model = tiny_model(model_type, ALL, window(3, 2), dtype=torch.float64)
    assert influenced(model, 20, 0) == list(range(20))
    assert influenced(model, 20, 1) == list(range(1, 20))
    assert influenced(model, 20, 2) == list(range(2, 2 + 4 * 2 + 1))


def test_sinks_are_those_of_the_document() -> None:
    model = tiny_model("qwen3", ALL, window(3, 1), dtype=torch.float64)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    assert influenced(model, 20, 0, position_ids=positions) == list(range(8))
    assert influenced(model, 20, 8, position_ids=positions) == list(range(8, 20))
    assert influenced(model, 20, 9, position_ids=positions) == list(range(9, 9 + 4 * 2 + 1))


@pytest.mark.parametrize("sinks", [0, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 30])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_pieces_with_a_cache_equal_the_whole(size: int, sinks: int, kind: str) -> None:
    model = tiny_model("llama", ("sliding", "sse", "sliding", "full"), window(size, sinks), dtype=torch.float64)
    ids, mask = prompts((16, 3, 9))
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=20)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    pieces = []
    for start, stop in ((0, 2), (2, 3), (3, 10), (10, 11), (11, 12), (12, 16)):
        part = slice(start, stop)
        inputs = {"attention_mask": mask[:, :stop], "position_ids": position[:, part], "past_key_values": cache}
        pieces.append(model(ids[:, part], **inputs).logits)
    whole = torch.cat(pieces, 1)
    for row in range(3):
        alone = model(ids[row, mask[row].bool()][None], use_cache=False).logits[0]
        torch.testing.assert_close(whole[row, mask[row].bool()], alone, atol=1e-9, rtol=0)
    layer = cache.layers[0]
    assert layer.sink_keys.shape[2] == sinks
    assert layer.keys.shape[2] == size - 1


def _storage(cache: DynamicCache) -> int:
    return cache.layers[0].keys.untyped_storage().data_ptr()


@pytest.mark.parametrize("layers", [ALL, ("sse+sliding", "sliding", "full", "full")], ids=str)
@pytest.mark.parametrize(("size", "sinks"), [(1, 0), (1, 2), (4, 0), (4, 3)])
@torch.no_grad()
def test_a_full_window_turns_and_can_stop_turning(layers: tuple[str, ...], size: int, sinks: int) -> None:
    mixers = {"sse+sliding": {"kind": "sse+sliding", "window": size, "sinks": sinks}, **window(size, sinks)}
    model = tiny_model("llama", layers, mixers, dtype=torch.float64)
    cache, ids = DynamicCache(config=model.config), prompts((44,))[0].expand(2, -1).clone()
    ids[1] = ids[1].flip(0)
    expected, places = model(ids, use_cache=False).logits, []

    def piece(start: int, stop: int) -> None:
        logits = model(ids[:, start:stop], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, start:stop], atol=1e-9, rtol=0)
        places.append(_storage(cache))

    def steps(start: int, stop: int) -> None:
        places.clear()
        for column in range(start, stop):
            piece(column, column + 1)

    piece(0, 7)
    steps(7, 17)
    assert len(set(places)) == 1, "a step moves no key but the newest"
    piece(17, 20)
    assert cache.layers[0].keys.shape[2] == size - 1
    with torch.inference_mode():
        steps(20, 26)
    steps(26, 28)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids, expected = ids.flip(0), expected.flip(0)
    steps(28, 32)
    kept = copy.deepcopy(cache)
    steps(32, 35)
    cache = kept
    steps(32, 35)
    cache.activate_past_recording()
    steps(35, 38)
    cache.crop(-2)
    steps(36, 40)


def test_a_ring_is_put_in_order_for_a_mask() -> None:
    """Of a token that was seen and is now hidden; steps with gradients turn no ring."""
    model = tiny_model("llama", ("sliding", "full", "full", "full"), window(3, 1), dtype=torch.float64)
    ids, logits = prompts((13,))[0], []
    for turning in (True, False):
        with torch.set_grad_enabled(not turning):
            cache = DynamicCache(config=model.config)
            for start, stop in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
                model(ids[:, start:stop], past_key_values=cache)
            mask = torch.ones(1, 13, dtype=torch.long)
            mask[0, 11] = 0
            logits.append(model(ids[:, 12:], past_key_values=cache, attention_mask=mask).logits.detach())
    torch.testing.assert_close(*logits, atol=1e-9, rtol=0)


@torch.no_grad()
def test_right_padded_rows_are_continued() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = prompts((9, 4), side="right")
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=cache)
    more = torch.randint(3, VOCAB, (2, 2))
    mask = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    position = (mask.cumsum(1) - 1)[:, -2:]
    logits = model(more, attention_mask=mask, position_ids=position, past_key_values=cache).logits
    alone = model(torch.cat([ids[:1], more[:1]], 1)).logits[0, -2:]
    torch.testing.assert_close(logits[0], alone, atol=1e-9, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("before", "costs"), [(0, False), (6, True), (20, False)])
def test_pads_use_up_a_window_inside_a_row_alone(before: int, costs: bool) -> None:
    """More pads than a window has columns, left of a row's tokens, among them, and right of them."""
    model = tiny_model("llama", ("sse+sliding", "sliding", "sse", "full"), dtype=torch.float64)
    ids, pads = prompts((20,))[0], torch.zeros(1, 9, dtype=torch.long)
    padded = torch.cat([ids[:, :before], pads, ids[:, before:]], 1)
    mask = torch.ones_like(padded)
    mask[:, before : before + 9] = 0
    logits = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[mask.bool()]
    assert ((logits - model(ids).logits[0]).abs().max() > 0.1) == costs
    assert costs or torch.allclose(logits, model(ids).logits[0], atol=1e-9, rtol=0)


@torch.no_grad()
def test_eager_equals_sdpa() -> None:
    ids, mask = prompts()
    logits = []
    for kind in ("sdpa", "eager"):
        model = tiny_model("qwen3", dtype=torch.float64)
        model.set_attn_implementation(kind)
        logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits, atol=1e-9, rtol=0)


def test_other_attention_kinds_are_refused() -> None:
    model = tiny_model("llama", ALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UsageError, match="'flash_attention_2', and the model has converted sliding layers"):
        model(prompts()[0])


def test_attention_dropout_still_acts_in_training() -> None:
    model = tiny_model("llama", ALL, attention_dropout=0.5)
    ids = prompts((11,))[0]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_wide_window_is_full_attention() -> None:
    ids, mask = prompts()
    for model_type in ("llama", "granite", "starcoder2"):
        full = tiny_model(model_type, ("full",) * 4, dtype=torch.float64)
        wide = tiny_model(model_type, ALL, window(64, 0), dtype=torch.float64)
        options = {"attention_mask": mask, "use_cache": False}
        real = mask.bool()
        torch.testing.assert_close(
            wide(ids, **options).logits[real], full(ids, **options).logits[real], atol=1e-9, rtol=0
        )


def test_two_windows_in_one_model() -> None:
    mixers = {"near": {"kind": "sliding", "window": 2, "sinks": 0}, "far": {"kind": "sliding", "window": 5, "sinks": 0}}
    model = tiny_model("llama", ("near", "far", "near", "far"), mixers, dtype=torch.float64)
    assert influenced(model, 20, 3) == list(range(3, 3 + 1 + 4 + 1 + 4 + 1))
    ids = prompts((15,))[0]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=PAD)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=PAD), expected)


def test_crop_needs_recording_and_gives_back_the_past() -> None:
    layer = SlidingCacheLayer(window=4, sinks=1)
    layer.activate_past_recording()
    keys = torch.arange(10.0).view(1, 1, 10, 1)
    layer.locate_sinks(torch.zeros(1, 1, dtype=torch.long), padded=False)
    layer.update(keys, keys)
    layer.crop(-3)
    assert layer.get_seq_length() == 7
    assert layer.keys.flatten().tolist() == [4, 5, 6]
    with pytest.raises(UsageError, match=r"crop\(-1\) after 0 recorded tokens"):
        layer.crop(-1)
    fresh = SlidingCacheLayer(window=4, sinks=1)
    with pytest.raises(UsageError, match="does not record its past"):
        fresh.crop(-1)
    with pytest.raises(UsageError, match="static cache cannot take tokens back"):
        SlidingCacheLayer(window=4, sinks=1, static_length=8).activate_past_recording()
