"""Families as data, and the table of new tensors."""

import dataclasses as dc

import pytest
import torch
from transformers import PreTrainedModel

from sse_convert.errors import CheckpointError
from sse_convert.mixers import BUILT_IN, DECAY_NORMALIZER, SSEMixer
from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT, source_spec, spec_for
from sse_convert.modeling.attention_dims import attention_dims, differs_by_layer, dims_by_layer, softmax_layers
from sse_convert.modeling.initialise import decay_bias, fresh_sse_tensors
from sse_convert.modeling.projections import is_rotated
from sse_convert.modeling.tensors import new_tensors, state_shape
from tests.modeling.tiny import ENTRIES, LISTED, tiny_config, tiny_model, tiny_source


def test_all_families_are_tested() -> None:
    assert set(LISTED) == ARCHITECTURES.keys()


def test_an_unknown_family_says_what_to_add() -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_for("mamba2")
    assert caught.value.what == "model_type is 'mamba2', a family sse-convert does not know"
    assert ", ".join(sorted(ARCHITECTURES | IMAGE_TEXT)) in caught.value.expected
    assert "add an ArchSpec" in caught.value.fix


def test_a_converted_checkpoint_is_not_converted_again() -> None:
    with pytest.raises(CheckpointError, match="'sse_llama': this checkpoint is already converted"):
        spec_for("sse_llama")
    assert source_spec("sse_llama") is source_spec("llama") is ARCHITECTURES["llama"]


@pytest.mark.parametrize("model_type", ENTRIES)
def test_the_spec_describes_the_source(model_type: str) -> None:
    spec, model = spec_for(model_type), tiny_source(model_type)
    assert type(model).__name__ == spec.causal_lm_class
    backbone: PreTrainedModel = getattr(model, spec.backbone)
    assert type(backbone).__name__ == spec.backbone_class
    assert getattr(backbone, spec.embeddings) is model.get_input_embeddings()
    for index in softmax_layers(model.config):
        dims = attention_dims(model.config, index)
        attention = model.get_submodule(spec.attention_path(index))
        own = spec.of(model.config, rotated=is_rotated(attention, spec), own_values=dims.own_values)
        modules = [getattr(attention, name) for name in (*own.qkv, own.output)]
        assert all((type(module).__name__ == "Conv1D") == own.conv1d for module in modules)
        if own.qk_norm != "none":
            whole = dims.query_heads * dims.head_dim
            norm = getattr(attention, own.qk_norms[0])
            if weights := list(norm.parameters()):
                assert weights[0].shape == ((whole,) if own.qk_norm == "whole" else (dims.head_dim,))
    assert (hasattr(backbone, "rotary_emb")) == spec.rotary


def test_dims() -> None:
    assert attention_dims(tiny_config("qwen3")) == attention_dims(tiny_model("qwen3").config)
    dims = attention_dims(tiny_config("gpt2"))
    assert (dims.hidden, dims.query_heads, dims.kv_heads, dims.head_dim) == (32, 4, 4, 8)


def test_dims_of_layers_that_differ() -> None:
    config = tiny_config("gemma4_text")
    first, *_, last = dims_by_layer(config)
    assert (first.head_dim, first.kv_heads, first.own_values) == (8, 2, True)
    assert (last.head_dim, last.kv_heads, last.own_values) == (16, 1, False)
    assert (first.projected, last.projected) == (4 * 32 + 2 * 32 + 2 * 16, 3 * 32 + 2 * 64 + 16)
    assert attention_dims(config, 3) == last
    assert differs_by_layer(config)
    assert not differs_by_layer(tiny_config("llama"))


def test_paper_layer_of_qwen3_0_6b() -> None:
    """28 layers of hidden size 1024, 16 query heads, 8 key-value heads of 128."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    dims = attention_dims(tiny_config("qwen3", **config))
    sizes = {spec.name: spec.size for spec in new_tensors(dims, SSEMixer())}
    assert sizes["sse_router.weight"] == 4 * 1024
    assert sizes["sse_delta_q_down.weight"] + sizes["sse_delta_q_up.weight"] == 64 * (1024 + 2048)
    assert sizes["sse_decay_up.bias"] == 8 * 128
    assert state_shape(dims, SSEMixer()) == (5, 8, 128, 128)
    assert state_shape(dims, dc.replace(BUILT_IN["gla"], state_heads="query")) == (1, 16, 128, 128)
    assert "sse_router.weight" not in {spec.name for spec in new_tensors(dims, BUILT_IN["gla"])}


def test_fresh_tensors_are_those_of_the_layer_and_reproducible() -> None:
    dims, mixer = attention_dims(tiny_config("llama")), SSEMixer(decay_params="separate")
    tensors = fresh_sse_tensors(dims, mixer, torch.Generator().manual_seed(7))
    assert [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == [
        (spec.name, spec.shape) for spec in new_tensors(dims, mixer)
    ]
    again = fresh_sse_tensors(dims, mixer, torch.Generator().manual_seed(7))
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    other = fresh_sse_tensors(dims, mixer, torch.Generator().manual_seed(8))
    assert not torch.equal(other["sse_router.weight"], tensors["sse_router.weight"])
    assert tensors["sse_router.weight"].all()


@pytest.mark.parametrize("decay", ["gla", "scalar"])
def test_half_lives_are_spread_over_the_heads(decay: str) -> None:
    dims = attention_dims(tiny_config("llama", num_attention_heads=8, num_key_value_heads=8))
    mixer = SSEMixer(decay=decay)
    bias = decay_bias(dims, mixer).double().view(8, -1)[:, 0]
    log_decay = torch.nn.functional.logsigmoid(bias) / DECAY_NORMALIZER
    half_lives = torch.log(torch.tensor(0.5).double()) / log_decay
    expected = torch.logspace(4, 12, 8, base=2, dtype=torch.float64)
    torch.testing.assert_close(half_lives, expected, rtol=1e-4, atol=0)
