"""Saving and loading: with the package, with the code in the checkpoint alone, and not as something else."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.configuration import config_class_for
from sse_convert.modeling.hybrid import model_class_for, source_class
from sse_convert.modeling.initialise import decay_bias
from sse_convert.modeling.remote_code import CODE_FOLDER, README, remote_code, write_remote_code
from sse_convert.modeling.sink_attention import use_kernels
from tests.elsewhere import without_package
from tests.modeling.tiny import (
    BASELINES,
    BESIDE,
    ENTRIES,
    FAMILIES,
    HEADS,
    LAYOUT,
    prompts,
    tiny_config,
    tiny_model,
    tiny_source,
)

ROOT = Path(__file__).parents[2]


def code_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.glob(f"{CODE_FOLDER}/*")}


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    ids, mask = prompts()
    return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize(
    ("model_type", "layers"), [*((name, LAYOUT) for name in FAMILIES), ("llama", BASELINES), ("phi3", HEADS)]
)
def test_a_saved_model_loads_through_the_auto_classes(model_type: str, layers: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(model_type, layers)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    use_kernels(model)  # as loading does
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class_for(type(tiny_config(model_type)))
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert (again / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2"])
def test_the_configuration_is_the_sources_with_one_more_field(model_type: str) -> None:
    source, config = tiny_config(model_type).to_dict(), tiny_model(model_type).config
    found = config.to_dict()
    assert found.pop("model_type") == f"sse_{model_type}"
    assert {key for key in found if key not in source} == {"sse", "auto_map", "plain_class_guard"}
    same = source.keys() - {"model_type", "architectures", "dtype"}
    assert {key: found[key] for key in same} == {key: source[key] for key in same}


def test_config_json_is_what_the_contract_says(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["model_type"] == "sse_qwen3"
    assert data["architectures"] == ["SSEQwen3ForCausalLM"]
    assert data["auto_map"] == {
        "AutoConfig": "sse_code/configuration_sse.SSEQwen3Config",
        "AutoModel": "sse_code/modeling_sse.SSEQwen3Model",
        "AutoModelForCausalLM": "sse_code/modeling_sse.SSEQwen3ForCausalLM",
        "AutoModelForSequenceClassification": "sse_code/modeling_sse.SSEQwen3ForSequenceClassification",
    }
    assert data["layer_types"] == ["full_attention"] * 4
    assert data["sse"]["format"] == 2
    assert data["sse"]["source_model_type"] == "qwen3"
    assert data["sse"]["layers"] == ["sse", "sliding", "sse", "full"]
    assert data["sse"]["backend"] == "auto"


@pytest.mark.slow
def test_code_in_the_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    ids, mask = prompts()
    inputs = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    for model_type, layers in (("qwen3", LAYOUT), ("gpt2", LAYOUT), ("llama", BASELINES), ("gemma2", BESIDE)):
        model = tiny_model(model_type, layers)
        model.save_pretrained(tmp_path / model_type)
        expected = {"ids": ids, "inputs": inputs, "logits": logits(model), "generated": model.generate(ids, **inputs)}
        torch.save(expected, tmp_path / f"{model_type}.pt")
    without_package(
        _REMOTE, tmp_path, "qwen3", "Qwen3ForCausalLM", "gpt2", "GPT2LMHeadModel", "llama", "LlamaForCausalLM",
        "gemma2", "Gemma2ForCausalLM",
    )  # fmt: skip
    for folder in ("qwen3", "qwen3-again", "gpt2-again", "llama-again", "gemma2-again"):
        assert code_files(tmp_path / folder) == remote_code().keys()


_REMOTE = """
import copy, multiprocessing, pickle
from tempfile import TemporaryFile

def check_copies(model):
    with TemporaryFile() as file:
        torch.save(model, file)
        file.seek(0)
        whole = torch.load(file, weights_only=False)
    for again in (whole, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

def check(folder, expected):
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        found = model(expected["ids"], attention_mask=expected["inputs"]["attention_mask"]).logits
    assert torch.equal(found, expected["logits"])
    assert torch.equal(model.generate(expected["ids"], **expected["inputs"]), expected["generated"])
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    check_copies(model)
    return model

def must_fail(load, text):
    try:
        load()
    except Exception as error:
        assert text in str(error), error
    else:
        raise SystemExit("loaded, where it should say: " + text)

for name, source in zip(sys.argv[1::2], sys.argv[2::2]):
    expected = torch.load(f"{name}.pt")
    check(name, expected).save_pretrained(f"{name}-again")
    check(f"{name}-again", expected)
    config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    assert type(AutoModelForCausalLM.from_config(config, trust_remote_code=True)).__name__ == config.architectures[0]
    must_fail(lambda: AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False), "contains custom code")
    must_fail(lambda: getattr(transformers, source).from_pretrained(name), "this checkpoint has SSE layers")
sys.modules["__main__"].__spec__ = sys.modules["__main__"].__file__ = None  # a worker does not run this script
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.apply(type(check(name, expected)).num_parameters, (check(name, expected),)) > 0
assert "sse_convert" not in sys.modules
"""


def test_remote_code_is_one_folder_self_contained_and_deterministic(tmp_path: Path) -> None:
    files = remote_code()
    assert files == remote_code()
    known = ("configuration_sse", "modeling_sse", "errors", "kernels_dispatch")
    assert {f"sse_code/{name}.py" for name in known} <= files.keys()
    assert {Path(name).parent for name in files} == {Path("sse_code")}
    for name, text in files.items():
        if name.endswith(README):
            continue
        compile(text, name, "exec")
        assert not re.search(r"^\s*(from|import) sse_convert", text, re.MULTILINE), name
    written = write_remote_code(tmp_path / "model")
    assert code_files(tmp_path / "model") == files.keys()
    stamps = [path.stat().st_mtime_ns for path in written]
    assert written == [tmp_path / "model" / name for name in sorted(files)]
    write_remote_code(tmp_path / "model")
    assert [path.stat().st_mtime_ns for path in written] == stamps


def test_the_code_stays_small_and_says_what_each_file_does() -> None:
    files = remote_code()
    readme = files[f"{CODE_FOLDER}/{README}"]
    assert len(files) <= 45
    assert sum(text.count("\n") for text in files.values()) <= 8000
    rows = dict(re.findall(r"^\| `(.+?)` \| (\w.+) \|$", readme, re.MULTILINE))
    assert {f"{CODE_FOLDER}/{name}" for name in (*rows, README)} == files.keys()


def test_what_does_not_travel_says_so() -> None:
    from sse_convert.modeling import left_out

    x = torch.zeros(1)
    assert "import sse_convert" in left_out.unavailable_reason(x.device)
    with pytest.warns(UserWarning, match="without Triton kernels: import sse_convert"):
        left_out.unavailable_reason(torch.device("cuda"))
    assert not left_out.has_kernels(x)
    with pytest.raises(UsageError, match="sse_attention_reference is not in the code of a checkpoint"):
        left_out.sse_attention_reference(x)


def test_half_precision_load_keeps_values_and_device(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert load_pretrained(tmp_path, device="cpu").dtype == torch.float32


def test_weights_on_disk_give_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    names = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(4)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    places = {name: "disk" if name in ("model.layers.1", "model.layers.2") else "cpu" for name in names}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    ids, mask = prompts()
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


def test_plain_teachers_load_too(tmp_path: Path) -> None:
    source = tiny_source("llama")
    source.save_pretrained(tmp_path)
    assert type(load_pretrained(tmp_path)) is type(source)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_source_weights_load_into_the_hybrid_and_new_tensors_are_initialised(model_type: str, tmp_path: Path) -> None:
    source = tiny_source(model_type)
    hybrid = tiny_model(model_type, ("sse", "gla", "sliding", "full"), {"gla": {"kind": "gla"}})
    source.save_pretrained(tmp_path)
    cls = model_class_for(source_class(spec_for(model_type)))
    model, info = cls.from_pretrained(tmp_path, config=hybrid.config, output_loading_info=True)
    assert info["missing_keys"] == {key for key in hybrid.state_dict() if ".sse_" in key}
    assert not info["unexpected_keys"]
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    layer = model.sse_layers()[0]
    assert not layer.sse_delta_q_up.weight.any()
    assert not layer.sse_decay_up.weight.any()
    assert bool((layer.sse_out_scale == 1).all())
    assert bool((layer.sse_k_scale == 1).all())
    assert torch.equal(layer.sse_decay_up.bias.detach(), decay_bias(layer.dims, layer.mixer))
    assert 0.005 < float(layer.sse_router.weight.detach().std()) < 0.05


def test_new_tensors_of_the_delta_rule_are_initialised(tmp_path: Path) -> None:
    tiny_source("qwen3").save_pretrained(tmp_path)
    hybrid = tiny_model("qwen3", BASELINES)
    model = type(hybrid).from_pretrained(tmp_path, config=hybrid.config)
    for layer in model.sse_layers().values():
        strength = torch.sigmoid(layer.sse_write_strength(torch.randn(5, 32)))
        torch.testing.assert_close(strength, torch.full_like(strength, 0.5))


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.self_attn.sse_router.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys: model\.layers\.0\.self_attn\.sse_router\.weight"):
        load_pretrained(tmp_path)


def test_loading_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected: a causal language model checkpoint"):
        load_pretrained(tmp_path)


def test_derived_classes_have_names_and_homes() -> None:
    for spec in map(spec_for, ENTRIES):
        cls = model_class_for(source_class(spec))
        assert cls is model_class_for(source_class(spec))
        assert cls.__name__ == spec.hybrid_causal_lm
        assert getattr(sys.modules[cls.__module__], cls.__name__) is cls
        assert cls.config_class.model_type == spec.hybrid_type
        assert getattr(sys.modules[cls.config_class.__module__], cls.config_class.__name__) is cls.config_class
    with pytest.raises(AttributeError, match="SSEMambaForCausalLM"):
        _ = sys.modules[cls.__module__].SSEMambaForCausalLM
