"""A model made from a configuration has every value set: none is what happened to be in memory (here NaN)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.auto import register
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class
from tests.modeling.tiny import FAMILIES, MIXERS, tiny_config, tiny_model

Make = Callable[[PreTrainedConfig], PreTrainedModel]
SETTINGS = {
    **MIXERS,
    "gla": {"kind": "gla"},
    "separate": {**MIXERS["delta"], "decay_params": "separate"},
}


def config_of(model_type: str, kind: str) -> PreTrainedConfig:
    sse = {"layers": [kind, kind, "full", kind], "mixers": {kind: SETTINGS[kind]}, "base_model": "tiny"}
    return build_config(tiny_config(model_type), sse)


def by_class(config: PreTrainedConfig) -> PreTrainedModel:
    return model_class_for(source_class(spec_for(config.model_type.removeprefix("sse_"))))(config)


def by_auto(config: PreTrainedConfig) -> PreTrainedModel:
    register()
    return AutoModelForCausalLM.from_config(config)


def values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_set(model: PreTrainedModel) -> None:
    unset = [name for name, value in values(model).items() if not torch.isfinite(value).all()]
    assert not unset


@pytest.mark.parametrize("make", [by_class, by_auto])
@pytest.mark.parametrize("kind", SETTINGS)
def test_every_value_is_set_and_the_seed_decides_it(kind: str, make: Make) -> None:
    config = config_of("qwen3", kind)
    torch.manual_seed(3)
    first = make(config)
    torch.manual_seed(3)
    second = make(config)
    assert_set(first)
    again = values(second)
    for name, value in values(first).items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_value_is_set_in_every_family(model_type: str) -> None:
    assert_set(by_class(config_of(model_type, "sse+sliding")))


@pytest.mark.parametrize("kind", ["sse", "sse+sliding"])
def test_a_model_from_a_configuration_is_initialised_as_a_converted_one(kind: str) -> None:
    layer = by_class(config_of("qwen3", kind)).sse_layers()[0]
    assert not layer.sse_delta_q_up.weight.any()
    assert layer.sse_decay_up.bias.all()
    assert bool((layer.sse_k_scale == 1).all())
    assert bool((layer.sse_out_scale == (1 if kind == "sse" else 0.01)).all())
    if kind == "sse+sliding":
        assert bool((layer.sse_window_scale == 1).all())


@pytest.mark.parametrize("kind", SETTINGS)
def test_tensors_that_a_checkpoint_lacks_are_set(kind: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3", (kind, kind, "full", kind), SETTINGS)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in stored.items() if "sse_" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {name for name in stored if "sse_" in name}
    assert_set(loaded)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_empty_model_takes_no_memory(kind: str) -> None:
    with init_empty_weights():
        model = by_class(config_of("qwen3", kind))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
