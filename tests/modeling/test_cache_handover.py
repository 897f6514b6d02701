"""A converted model computes with its own cache or refuses by name, however a library hands caches on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from sse_convert.errors import SSEConvertError, UsageError
from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.compat import CACHE, CACHE_NAMES, cache_argument
from sse_convert.modeling.layout import LAYOUT as SEQUENCES
from sse_convert.modeling.window.sliding import MASKS
from tests.modeling.tiny import BASELINES, HEADS, LAYOUT, prompts, tiny_model, tiny_source

IDS = prompts((12,))[0]
PURE = ("sse",) * 4
NAMES = pytest.mark.parametrize("name", CACHE_NAMES)
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3", LAYOUT, dtype=torch.float64)


def split(model: nn.Module, name: str, cache: Any) -> Tensor:
    """Logits, or last hidden states, of a row in two forwards over one cache."""
    with torch.no_grad():
        outputs = [model(IDS[:, part], **{name: cache})[0] for part in (slice(0, 7), slice(7, 12))]
    return torch.cat(outputs, 1)


@NAMES
@pytest.mark.parametrize("inside", [False, True], ids=["head", "backbone"])
def test_the_cache_has_either_name_in_every_version(model: PreTrainedModel, name: str, inside: bool) -> None:
    called = model.model if inside else model
    with torch.no_grad():
        whole = called(IDS, use_cache=False)[0]
    torch.testing.assert_close(split(called, name, DynamicCache(config=model.config)), whole, atol=1e-10, rtol=0)


@NAMES
def test_generation_takes_the_cache_under_either_name(model: PreTrainedModel, name: str) -> None:
    plan: Arguments = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, use_cache=False, **plan)
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(IDS, **{name: cache}, **plan), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_a_cache_may_be_passed_by_position(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :7], None, None, cache)
        torch.testing.assert_close(
            model.model(IDS[:, 7:], None, None, cache)[0], model.model(IDS)[0][:, 7:], atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("called", ["head", "backbone", "generate"])
def test_the_same_cache_twice_is_one_and_another_beside_it_is_refused(model: PreTrainedModel, called: str) -> None:
    call = {"head": model, "backbone": model.model, "generate": model.generate}[called]
    cache = DynamicCache(config=model.config)
    call(IDS, **dict.fromkeys(CACHE_NAMES, cache))
    assert cache.get_seq_length() >= IDS.shape[1]
    with pytest.raises(UsageError, match="are different caches"):
        call(IDS, **{name: DynamicCache(config=model.config) for name in CACHE_NAMES})


@pytest.mark.parametrize("dropped", CACHE_NAMES)
def test_a_name_without_a_cache_does_not_hide_the_other(model: PreTrainedModel, dropped: str) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS, **{dropped: None, **{name: cache for name in CACHE_NAMES if name != dropped}})
    assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("name", ["cache_params", "kv_cache", "attention_mask", "position_ids", "past"])
@pytest.mark.parametrize("inside", [False, True], ids=["head", "backbone"])
def test_a_cache_under_another_name_is_refused(model: PreTrainedModel, name: str, inside: bool) -> None:
    with pytest.raises(UsageError, match=f"a DynamicCache as {name}"):
        (model.model if inside else model)(IDS, **{name: DynamicCache(config=model.config)})


def filled(model: PreTrainedModel, cache: Any = None) -> Any:
    """The cache of a model that has seen a row."""
    with torch.no_grad():
        return model(IDS, use_cache=True, **{CACHE: cache})[CACHE]


def of_plain(model: PreTrainedModel) -> Any:
    return filled(tiny_source("qwen3", dtype=torch.float64))


def static_of_plain(model: PreTrainedModel) -> Any:
    plain = tiny_source("qwen3", dtype=torch.float64)
    return filled(plain, StaticCache(config=plain.config, max_cache_len=32))


def of_fewer_layers(model: PreTrainedModel) -> Any:
    return DynamicCache(config=tiny_source("qwen3", num_hidden_layers=2).config)


def with_a_kept_layer_filled(model: PreTrainedModel) -> Any:
    cache = DynamicCache(config=model.config)
    cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), 3)
    return cache


def without_configuration(model: PreTrainedModel) -> Any:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), 0)
    return cache


def with_a_layer_replaced(model: PreTrainedModel) -> Any:
    cache = filled(model)
    cache.layers[0] = DynamicLayer()
    return cache


def with_a_kept_layer_replaced(model: PreTrainedModel) -> Any:
    cache = filled(model)
    cache.layers[3] = DynamicLayer()
    return cache


def of_more_rows(model: PreTrainedModel) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS.expand(2, -1), **{CACHE: cache})
    return cache


OTHERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "other layers converted": lambda _: filled(tiny_model("qwen3", ("full", "sse", "sliding", "sse"))),
    "all layers converted": lambda _: filled(tiny_model("qwen3", PURE)),
    "other kinds": lambda _: filled(tiny_model("qwen3", BASELINES)),
    "other partitions": lambda _: filled(tiny_model("qwen3", LAYOUT, {"sse": {"kind": "sse", "num_partitions": 2}})),
    "other heads": lambda _: filled(tiny_model("qwen3", LAYOUT, num_key_value_heads=4)),
    "another family": lambda _: filled(tiny_model("llama", LAYOUT, dtype=torch.float64)),
    "a tuple": lambda _: ((IDS, IDS),) * 4,
    "a dictionary": lambda _: {"0": IDS},
    "a tensor": lambda _: IDS,
    "a class": lambda _: DynamicCache,
    "encoder and decoder": lambda _: EncoderDecoderCache(DynamicCache(), DynamicCache()),
}
FOREIGN = {
    **{make.__name__: make for make in (
        of_plain, static_of_plain, of_fewer_layers, with_a_kept_layer_filled, without_configuration,
        with_a_layer_replaced, with_a_kept_layer_replaced, of_more_rows,
    )},
    **OTHERS,
}  # fmt: skip


@NAMES
@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_cache_that_is_not_the_models_own_is_refused(
    model: PreTrainedModel, make: Callable[[PreTrainedModel], Any], name: str
) -> None:
    for call in (model, model.model):
        with pytest.raises(UsageError):
            call(IDS, **{name: make(model)})


@torch.no_grad()
def test_a_copied_cache_goes_on(model: PreTrainedModel) -> None:
    cache, whole = DynamicCache(config=model.config), model(IDS)[0]
    model(IDS[:, :7], **{CACHE: cache})
    found = model(IDS[:, 7:], **{CACHE: copy.deepcopy(cache)})[0]
    torch.testing.assert_close(found, whole[:, 7:], atol=1e-10, rtol=0)


@pytest.mark.skipif("reset" not in vars(DynamicLayer), reason="transformers keeps the length of a cleared cache")
@torch.no_grad()
def test_a_cleared_cache_begins_anew(model: PreTrainedModel) -> None:
    cache = filled(model)
    cache.reset()
    torch.testing.assert_close(model(IDS, **{CACHE: cache})[0], model(IDS)[0], atol=1e-10, rtol=0)


def renamed(arguments: Arguments, name: str) -> Arguments:
    return {**{key: value for key, value in arguments.items() if key != name}, "memory": arguments[name]}


def without(*dropped: str) -> Callable[[Arguments, str], Arguments]:
    return lambda arguments, name: {key: value for key, value in arguments.items() if key not in dropped}


WAYS: dict[str, Callable[[Arguments, str], Arguments]] = {
    "renamed": renamed,
    "dropped": lambda arguments, name: {key: value for key, value in arguments.items() if key != name},
    "none": lambda arguments, name: {**arguments, name: None},
    "fresh": lambda arguments, name: {**arguments, name: DynamicCache()},
    "copied": lambda arguments, name: {**arguments, name: copy.deepcopy(arguments[name])},
    "twice": lambda arguments, name: {**arguments, "memory": arguments[name]},
    "layout dropped": without(SEQUENCES),
    "masks dropped": without(MASKS),
    "nothing of ours": without(SEQUENCES, MASKS),
    "positions dropped": without("position_ids"),
    "tables dropped": without("position_embeddings"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("model_type", "layers"),
    [*(("llama", layers) for layers in (LAYOUT, PURE, BASELINES, HEADS)), ("gpt_neox", HEADS)],
    ids=lambda value: value if isinstance(value, str) else "-".join(dict.fromkeys(value)),
)
def test_a_layer_that_a_library_calls_otherwise_computes_the_same_or_refuses(
    model_type: str, layers: tuple[str, ...], way: str
) -> None:
    model = tiny_model(model_type, layers, dtype=torch.float64)
    spec, change = source_spec(model_type), WAYS[way]
    expected, wrong = split(model, CACHE, DynamicCache(config=model.config)), []
    for index, layer in enumerate(getattr(backbone_of(model), spec.layers)):
        attention = getattr(layer, spec.attention)
        name = getattr(attention, "cache_argument", None) or cache_argument(type(attention))
        hook = attention.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: (args, change(kwargs, name)), with_kwargs=True, prepend=True
        )
        try:
            found = split(model, CACHE, DynamicCache(config=model.config))
        except (SSEConvertError, TypeError):
            continue
        finally:
            hook.remove()
        if not torch.allclose(found, expected, atol=1e-10, rtol=0):
            wrong.append(index)
    assert not wrong


@pytest.mark.parametrize(("model_type", "layers"), [("llama", PURE), ("llama", LAYOUT), ("llama", HEADS)], ids=str)
def test_a_layer_that_is_called_by_position_refuses(model_type: str, layers: tuple[str, ...]) -> None:
    model, names = tiny_model(model_type, layers), ("hidden_states", "position_embeddings", "attention_mask", CACHE)

    def by_position(_: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        given = tuple(kwargs[name] for name in names)
        return given, {name: value for name, value in kwargs.items() if name not in names}

    for layer in model.model.layers[:3]:
        hook = layer.self_attn.register_forward_pre_hook(by_position, with_kwargs=True, prepend=True)
        with pytest.raises((UsageError, TypeError), match=r"received no|multiple values for argument"):
            split(model, CACHE, DynamicCache(config=model.config))
        hook.remove()


def test_a_layer_of_a_version_that_renamed_the_cache_is_not_built() -> None:
    class Attention(nn.Module):
        def forward(self, hidden_states: Tensor, memory: Any = None) -> Tensor:
            return hidden_states

    with pytest.raises(SSEConvertError, match="takes no cache under a known name"):
        cache_argument(Attention)


@pytest.mark.parametrize("layers", [LAYOUT, PURE, HEADS], ids=["mixed", "pure", "beside"])
def test_training_that_repeats_layers_needs_no_word_about_caches(layers: tuple[str, ...]) -> None:
    model = tiny_model("llama", layers).train()
    expected = model(IDS, labels=IDS).loss
    model.gradient_checkpointing_enable()
    for given in ({}, {"use_cache": True}, {"use_cache": False}):
        torch.testing.assert_close(model(IDS, labels=IDS, **given).loss, expected)
    written = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, model.generate(IDS, max_new_tokens=4, do_sample=False, use_cache=False))
    with pytest.raises(UsageError, match=r"received no cache|has seen 0 tokens"):
        model(IDS, labels=IDS, **{CACHE: DynamicCache(config=model.config)})
