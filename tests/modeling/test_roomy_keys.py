"""A softmax layer's cache with room for more: it keeps what transformers' keeps, and copies it rarely."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from sse_convert.modeling.roomy_keys import ROOM, RoomyLayer

CHANGES = {
    "crop": lambda layer: layer.crop(-3),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1, 1])),
    "reset": lambda layer: layer.reset(),
    "nothing": lambda layer: None,
}


def put(layer: DynamicLayer, seed: int, tokens: int = 1) -> None:
    """Add random tokens of two rows with three heads."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 2, 3, tokens, 4, generator=generator).unbind()
    for mine, kept in zip(layer.update(key, value), (layer.keys, layer.values), strict=True):
        assert mine is kept


def same(mine: DynamicLayer, theirs: DynamicLayer) -> None:
    """Both keep the same tokens."""
    assert torch.equal(mine.keys, theirs.keys)
    assert torch.equal(mine.values, theirs.values)
    assert mine.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_keeps_what_a_dynamic_layer_keeps(change: str) -> None:
    mine, theirs = RoomyLayer(), DynamicLayer()
    for layer in (mine, theirs):
        for seed, tokens in enumerate((7, *[1] * (ROOM + 2))):
            put(layer, seed, tokens)
        CHANGES[change](layer)
        for seed, tokens in enumerate((1, 1, 3, 1)):
            put(layer, seed, tokens)
    same(mine, theirs)


@torch.no_grad()
def test_copies_once_for_many_tokens() -> None:
    layer, places = RoomyLayer(), set()
    put(layer, 0, 7)
    for seed in range(ROOM):
        put(layer, seed)
        places.add(layer.keys.data_ptr())
    assert len(places) == 1


@torch.no_grad()
def test_copies_go_their_own_way() -> None:
    mine = RoomyLayer()
    put(mine, 0, 7)
    put(mine, 1)
    other = copy.deepcopy(mine)
    put(mine, 2)
    before = mine.keys.clone()
    put(other, 3)
    assert torch.equal(mine.keys, before)
    assert not torch.equal(mine.keys, other.keys)


def test_tokens_of_inference_mode_are_left_alone_outside() -> None:
    mine, theirs = RoomyLayer(), DynamicLayer()
    for layer in (mine, theirs):
        with torch.inference_mode():
            put(layer, 0, 7)
            put(layer, 1)
        with torch.no_grad():
            put(layer, 2)
    same(mine, theirs)


def test_gradients_flow() -> None:
    layer, key = RoomyLayer(), torch.ones(1, 1, 1, 4, requires_grad=True)
    with torch.no_grad():
        layer.update(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4))
        layer.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    layer.update(key, key)[0].sum().backward()
    assert key.grad.sum() == 4
