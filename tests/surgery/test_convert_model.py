"""Converting a model in memory gives what converting its folder gives, and leaves the model as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertLMHeadModel, PreTrainedModel

from sse_convert import convert_model
from sse_convert.errors import SSEConvertError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.recommended import recommended_mixer
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.modeling.tiny import tiny_source
from tests.surgery.models import recipe_data, save_teacher, tokens

WINDOW = {"window": 4, "sinks": 2}
PARTITIONS = {"num_partitions": 8, "top_k": 2, "qk_rank": 4, "advanced": {"shared_partition": True}}
SETTINGS = {
    "sse": PARTITIONS,
    "sse+sliding": {**PARTITIONS, **WINDOW},
    "sliding": WINDOW,
    "gdn": {},
}


@pytest.mark.parametrize(
    ("model_type", "mixer", "dtype"),
    [
        ("llama", "sse+sliding", torch.float32),
        ("qwen3", "sse+sliding", torch.bfloat16),
        ("gpt2", "sse", torch.float32),
        ("gemma2", "sliding", torch.float32),
        ("gpt_oss", "sse+sliding", torch.float32),
        ("deepseek_v3", "sse", torch.float32),
        ("llama4_text", "gdn", torch.float32),
    ],
)
def test_it_is_what_the_folder_becomes(model_type: str, mixer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every tensor and the logits, to the bit, after a round trip as well."""
    source = tiny_source(model_type, dtype=dtype)
    folder = save_teacher(source, tmp_path / "teacher")
    settings = {"layers": {"pattern": [mixer], "keep": [0, -1]}, "train": {"seed": 3}}
    made = {**recipe_data(folder, **settings), "mixers": {mixer: SETTINGS[mixer]}}
    convert_checkpoint(Job.of(recipe_from_dict(made)), tmp_path / "folder")
    expected = load_pretrained(tmp_path / "folder")
    found = convert_model(load_pretrained(folder), keep=[0, -1], mixer={"kind": mixer, **SETTINGS[mixer]}, seed=3)
    _agree(found, expected)
    found.save_pretrained(tmp_path / "saved")
    _agree(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), expected)


@torch.no_grad()
def _agree(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert type(found) is type(expected)
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(found(tokens()).logits, expected(tokens()).logits)
    assert found.config.sse["layers"] == expected.config.sse["layers"]
    assert found.generation_config.eos_token_id == expected.generation_config.eos_token_id


def test_the_model_stays_as_it_is() -> None:
    """Also when the hybrid is trained; tied weights are tied in both, and there are no more than two of any tensor."""
    model = tiny_source("llama", tie_word_embeddings=True).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = convert_model(model, keep=[0, 3], mixer="sse")
    assert found.lm_head.weight is found.get_input_embeddings().weight
    assert found.training is model.training is False
    own = {p.untyped_storage().data_ptr(): p.nbytes for p in found.parameters()}
    assert not own.keys() & {p.untyped_storage().data_ptr() for p in model.parameters()}
    added = sum(p.nbytes for name, p in found.named_parameters() if "sse_" in name)
    assert sum(own.values()) - added == sum(p.nbytes for p in model.parameters())
    assert all(p.requires_grad for p in found.parameters())
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())


def test_unset_the_mixer_is_that_of_a_new_recipe() -> None:
    model = tiny_source("llama", max_position_embeddings=2048)
    found = convert_model(model, keep=[0]).config.sse
    assert found["layers"] == ["full", *["sse+sliding"] * 3]
    expected = {"kind": "sse+sliding", **recommended_mixer(2048)}
    assert found["mixers"] == convert_model(model, keep=[0], mixer=expected).config.sse["mixers"]


def test_attention_stays_as_it_was_chosen() -> None:
    model = tiny_source("llama")
    model.set_attn_implementation("eager")
    assert convert_model(model, keep=[0], mixer="sse").config._attn_implementation == "eager"


def test_layers_of_linear_attention_stay() -> None:
    found = convert_model(tiny_source("qwen3_next"), keep=[1], mixer="sse")
    assert found.config.sse["layers"] == ["sse", "full", "sse", "full"]


def _empty(model: PreTrainedModel) -> Any:
    return model.to("meta")


def _adapted(model: PreTrainedModel) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def _injected(model: PreTrainedModel) -> Any:
    _adapted(model)
    return model


def _quantised(model: PreTrainedModel) -> Any:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    return model


def _resized(model: PreTrainedModel) -> Any:
    model.lm_head = nn.Linear(32, 12, bias=False)
    return model


def _gated(model: PreTrainedModel) -> Any:
    model.model.layers[2].self_attn.extra = nn.Linear(2, 2)
    return model


def _bert(model: PreTrainedModel) -> Any:
    return BertLMHeadModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        (lambda model: convert_model(model, keep=[0], mixer="sse"), "sse_llama.*already converted", "original model"),
        (_bert, "'bert', a family sse-convert does not know", "ArchSpec"),
        (lambda model: model.model, "model is a LlamaModel", "AutoModelForCausalLM"),
        (_adapted, "model is a PeftModel", "merge_and_unload"),
        (_injected, "has what its family's entry does not name|not the tensors of a sse_llama", ""),
        (nn.DataParallel, "model is a DataParallel", "model.module"),
        (torch.compile, "model is a OptimizedModule", "before torch.compile"),
        (lambda model: nn.Linear(2, 2), "model is a Linear", "AutoModelForCausalLM"),
        (_empty, "weights are on meta", "without device_map"),
        (_quantised, r"quantised \(weights of int8\)", "dequantize"),
        (_resized, "size mismatch for lm_head.weight", "load it anew"),
        (_gated, "module extra", "entry"),
    ],
)
def test_what_cannot_be_converted_is_refused(change: Any, what: str, fix: str) -> None:
    with pytest.raises(SSEConvertError, match=what) as found:
        convert_model(change(tiny_source("llama")), keep=[0], mixer="sse")
    assert fix in found.value.fix


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"keep": [4]}, r"keep is \[4\]\nexpected: a list of layers from -4 to 3"),
        ({"keep": [-5]}, r"keep is \[-5\]"),
        ({"keep": "25%"}, "keep is '25%'"),
        ({"keep": [0.5]}, r"keep is \[0.5\]"),
        ({"keep": range(4)}, r"all 4 layers stay as they are"),
        ({"mixer": "see"}, "mixer is 'see'; did you mean 'sse'"),
        ({"mixer": {"window": 4}}, "mixer.kind: required, because"),
        ({"mixer": {"kind": "sse", "partitions": 4}}, "mixer.partitions: unknown key"),
        ({"mixer": {"kind": "sliding", "window": 4096}}, "mixer: window is 4096, the model has 256 positions"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(SSEConvertError, match=what):
        convert_model(tiny_source("llama"), **{"keep": [0], "mixer": "sse", **arguments})


def test_a_backbone_of_another_head_is_refused(tmp_path: Path) -> None:
    tiny_source("qwen3").save_pretrained(tmp_path)
    with pytest.raises(SSEConvertError, match="Qwen3Model"):
        convert_model(AutoModel.from_pretrained(tmp_path), keep=[0])
