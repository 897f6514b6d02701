"""What cannot be converted, from config and headers alone. Every message says what is wrong with which value."""

import json

import pytest

from sse_convert.checkpoints.meta_model import check_complete
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.checkpoints.tokenizer_ids import tokenizer_size
from sse_convert.errors import CheckpointError
from tests.surgery import synthetic


@pytest.fixture
def folder(tmp_path):
    return synthetic.checkpoint(tmp_path / "m")


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as error:
        open_teacher(folder)
    assert error.value.fix
    return error.value


def test_a_sound_teacher(folder):
    teacher = open_teacher(folder)
    assert (teacher.num_layers, teacher.dims.kv_heads, teacher.dims.head_dim, teacher.dtype) == (3, 2, 8, "BF16")
    assert teacher.windows == [None] * 3
    assert check_complete(teacher) == []


def test_unknown_model_type(folder):
    synthetic.edit_config(folder, model_type="mamba2")
    assert "add an ArchSpec" in refused(folder, "model_type is 'mamba2', a family sse-convert does not know").fix


def test_already_converted(folder):
    synthetic.edit_config(folder, model_type="sse_llama")
    refused(folder, "model_type is 'sse_llama': this checkpoint is already converted")


def test_quantised(folder):
    synthetic.edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert refused(folder, r"is quantised \(gptq\)").fix.startswith("convert the original model")


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("fp8", "sse-convert dequantize {name} -o FOLDER"),
        ("mxfp4", "sse-convert dequantize {name} -o FOLDER"),
        ("bitsandbytes", "from_pretrained('{name}').dequantize().save_pretrained(FOLDER)"),
        ("awq", "the original model"),
        ("compressed-tensors", "the original model"),
    ],
)
def test_the_refusal_of_a_quantised_model_names_the_way_out(folder, method, way):
    synthetic.edit_config(folder, quantization_config={"quant_method": method})
    assert way.format(name=folder) in refused(folder, rf"is quantised \({method}\)").fix


def test_another_head(folder):
    synthetic.edit_config(folder, architectures=["LlamaForSequenceClassification"])
    assert "LlamaForCausalLM" in refused(folder, "is a LlamaForSequenceClassification").expected


def test_heads_do_not_divide(folder):
    synthetic.edit_config(folder, num_key_value_heads=3)
    refused(folder, "4 attention heads over 3 key-value heads")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 5}, "hidden size .* not a multiple of the number of attention heads"),
        ({"rms_norm_eps": "wide"}, "expected float, got str"),
    ],
)
def test_config_that_transformers_refuses(folder, changes, reason):
    synthetic.edit_config(folder, **changes)
    refused(folder, rf"does not describe a llama model: .*{reason}")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "wide"}, "hidden_size: expected a whole number, got 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is too small, expected 1 or more"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers: 10000000 is too large, expected 10000 or less"),
        ({"vocab_size": True}, "vocab_size: expected a whole number, got True"),
        ({"architectures": 1}, "is a 1"),
        ({"rope_parameters": {"rope_type": 3}}, "config.json"),
        ({"rope_parameters": {"rope_theta": True}}, r"config\.json: rope_theta is true or false"),
        ({"rope_scaling": {"full_attention": {"factor": False}}}, r"config\.json: factor is true or false"),
        ({"hidden_act": "nothing"}, "config.json"),
    ],
)
def test_sizes_and_types_of_a_config(folder, changes, reason):
    synthetic.edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=reason):
        check_complete(open_teacher(folder))


def test_a_config_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)
    refused(folder, "nested too deeply")
    (folder / "config.json").write_text('{"a": ' * 60 + "1" + "}" * 60)
    refused(folder, "nested more than 50 levels")


@pytest.mark.parametrize(
    ("changes", "tensor", "found", "expected"),
    [
        ({"num_attention_heads": 8, "head_dim": 8}, "q_proj", r"\[32, 32\]", "[64, 32]"),
        ({"num_key_value_heads": 4}, "k_proj", r"\[16, 32\]", "[32, 32]"),
        ({"vocab_size": 65}, "embed_tokens", r"\[64, 32\]", "[65, 32]"),
    ],
)
def test_shapes_against_the_config(folder, changes, tensor, found, expected):
    synthetic.edit_config(folder, **changes)
    assert expected in refused(folder, rf"tensor model\..*{tensor}\.weight of .* has shape {found}").expected


def test_missing_layers(folder):
    synthetic.edit_config(folder, num_hidden_layers=4)
    refused(folder, r"lacks 4 tensors that its config calls for: model\.layers\.3\.self_attn\.q_proj\.weight")


def test_integer_weights(tmp_path):
    layout = synthetic.llama_layout(synthetic.LLAMA)
    layout["model.layers.1.self_attn.o_proj.weight"] = ("I8", (32, 32))
    refused(synthetic.checkpoint(tmp_path / "i", layout=layout), r"o_proj\.weight of .* is stored as I8")


def test_every_tensor_is_looked_at_before_converting(tmp_path):
    layout = synthetic.llama_layout(synthetic.LLAMA)
    layout["model.layers.2.mlp.up_proj.weight"] = ("BF16", (47, 32))
    teacher = open_teacher(synthetic.checkpoint(tmp_path / "shape", layout=layout))
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight of .* has shape \[47, 32\]"):
        check_complete(teacher)
    del layout["model.layers.2.mlp.up_proj.weight"], layout["lm_head.weight"]
    teacher = open_teacher(synthetic.checkpoint(tmp_path / "missing", layout=layout))
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .*: model\.layers\.2\.mlp\.up_proj\.weight, lm_head"):
        check_complete(teacher)


def test_tensors_the_model_does_not_use_are_named(tmp_path):
    layout = synthetic.llama_layout(synthetic.LLAMA)
    layout["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (4,))
    teacher = open_teacher(synthetic.checkpoint(tmp_path / "m", layout=layout))
    assert check_complete(teacher) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def write_tokenizer(folder, size, added=()):
    vocabulary = {f"w{i}": i for i in range(size)}
    tokens = [{"id": i, "special": special} for i, special in added]
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("size", "added", "fits"),
    [
        (64, (), True),
        (65, (), False),
        (60, [(63, False)], True),
        (60, [(64, False)], False),
        (64, [(64, True)], True),
    ],
)
def test_tokenizer_against_the_embedding(folder, size, added, fits):
    write_tokenizer(folder, size, added)
    if fits:
        assert open_teacher(folder).config.vocab_size == 64
    else:
        refused(folder, "the tokenizer of .* has ids up to 64, the embedding has 64 rows")


def test_tokenizer_files(folder):
    assert tokenizer_size(folder) is None
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 7}))
    assert tokenizer_size(folder) == 8
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 5}}))
    assert tokenizer_size(folder) == 5
    (folder / "tokenizer.json").write_text("[]")
    refused(folder, r"tokenizer\.json is not a tokenizer file")


def test_a_config_alone_is_enough_to_plan():
    teacher = synthetic.teacher_from_config(synthetic.LLAMA, "some/model")
    assert teacher.files.headers.keys() == synthetic.llama_layout(synthetic.LLAMA).keys()
    assert teacher.dtype == "BF16"
