"""A swapped model is the converted model: same weights, same logits, in every family; and it is put back."""

import pytest
import torch

from sse_convert.mixers import SlidingMixer, mixer_to_dict
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for
from sse_convert.selection.layer_outputs import ROOM_ON_CPU, LayerOutputs
from sse_convert.selection.layer_swap import Swap
from sse_convert.training.setup import decoder_layers
from tests.modeling.tiny import FAMILIES, tiny_source
from tests.surgery.models import tokens

WINDOW = SlidingMixer(window=4, sinks=2)
KEPT = {1, 3}


def logits(model):
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits


def hybrid(source):
    """The converted model of the source with `KEPT` layers kept."""
    names = ["full" if i in KEPT else "new" for i in range(4)]
    sse = {"layers": names, "mixers": {"new": mixer_to_dict(WINDOW)}, "base_model": "tiny"}
    model = model_class_for(type(source))(build_config(source.config, sse)).to(source.dtype).eval()
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert not [name for name in missing if name in source.state_dict()]
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_windows_are_those_of_a_converted_model(model_type):
    model = tiny_source(model_type)
    before = logits(model)
    expected = logits(hybrid(model))
    swap = Swap(model, WINDOW)
    with swap.keeping(KEPT) as swapped:
        torch.testing.assert_close(logits(swapped), expected, rtol=1e-5, atol=1e-6)
    assert (before - expected).abs().max() > 1e-4
    assert torch.equal(logits(model), before)
    layers = list(decoder_layers(model))
    outputs = LayerOutputs(layers, 1, model.device)
    outputs.remember(tuple(KEPT), ["text"])
    for kept in (KEPT, {0, *KEPT}, {1}, {1, 2, 3}, {3}):
        with swap.keeping(kept) as swapped, outputs.during(("text", 0), tuple(kept)):
            found = logits(swapped)
        with swap.keeping(kept) as swapped:
            assert torch.equal(found, logits(swapped)), kept
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_before_the_first_that_differs_are_not_computed():
    model = tiny_source("qwen3")
    swap, layers, computed = Swap(model, WINDOW), list(decoder_layers(model)), []
    for i, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: computed.append(i))
    half = LayerOutputs(layers, ROOM_ON_CPU // 2, model.device)
    none = LayerOutputs(layers, ROOM_ON_CPU + 1, model.device)
    whole = LayerOutputs(layers, ROOM_ON_CPU // len(layers), model.device)
    for outputs, kept, expected in (
        (whole, (1, 2), [2, 3]),
        (whole, (3,), [1, 2, 3]),
        (whole, (1,), []),
        (half, (1, 3), [2, 3]),
        (half, (1, 2), [2, 3]),
        (half, (3,), [0, 1, 2, 3]),
        (none, (1, 3), [0, 1, 2, 3]),
    ):
        outputs.remember((1,), ["text"])
        for now in ((1,), kept):
            computed.clear()
            with swap.keeping(now) as swapped, outputs.during(("text", 0), now):
                logits(swapped)
        assert computed == expected, (kept, expected)


def test_outputs_of_rows_that_are_asked_no_more_are_dropped():
    model = tiny_source("qwen3")
    outputs = LayerOutputs(list(decoder_layers(model)), 1, model.device)
    outputs.remember((1,), ["text", "needle"])
    for name in ("text", "needle"):
        with outputs.during((name, 0), (1,)):
            logits(model)
    outputs.remember((1,), ["text", "table"])
    assert [outputs.has((name, 0)) for name in ("text", "needle", "table")] == [True, False, False]
    outputs.remember((2,), ["text", "table"])
    assert not outputs.has(("text", 0))


def test_layers_are_put_back_after_an_error():
    model = tiny_source("qwen3")
    swap = Swap(model, WINDOW)
    before = logits(model)
    with pytest.raises(IndexError), swap.keeping(()) as swapped:
        swapped(tokens() + 1000)
    assert torch.equal(logits(model), before)
