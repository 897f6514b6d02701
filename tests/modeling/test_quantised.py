"""Quantised by libraries: what conversion added is left alone, and a quantised model saves, loads and generates."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

import sse_convert
from sse_convert import api
from sse_convert.errors import CheckpointError, DependencyError
from sse_convert.modeling.auto import load_pretrained
from tests.elsewhere import without_package
from tests.modeling.tiny import BASELINES, BESIDE, FAMILIES, LAYOUT, prompts, tiny_model
from tests.surgery import synthetic

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
needs_compressor = pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llm-compressor is not installed")


def int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)))


def float8() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def eight_bits() -> Any:
    return BitsAndBytesConfig(load_in_8bit=True)


def four_bits() -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


QUANTISED = [
    *(pytest.param(make, marks=needs_torchao, id=make.__name__) for make in (int8, int4, float8)),
    *(pytest.param(make, marks=needs_bitsandbytes, id=make.__name__) for make in (eight_bits, four_bits)),
]


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    ids, mask = prompts()
    return model(ids, attention_mask=mask).logits.float()


def quantised(model: nn.Module) -> set[str]:
    """Names of the modules whose weights are no plain floating-point tensors."""
    plain = {torch.Tensor, nn.Parameter}
    return {
        name.removesuffix(".weight")
        for name, weight in model.named_parameters()
        if type(weight) not in plain or type(weight.data) not in plain or not weight.is_floating_point()
    }


def of_the_teacher(model: nn.Module) -> set[str]:
    """The linear layers that every quantisation takes: the teacher's, without the head."""
    endings = tuple(f".{name}" for name in sse_convert.peft_targets(model))
    return {name for name, _ in model.named_modules() if name.endswith(endings)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # blocks of bitsandbytes hold 64 weights
    tiny_model("qwen3", BESIDE, dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path / "converted")
    return tmp_path / "converted"


@pytest.mark.parametrize(
    ("family", "layers"), [*((name, LAYOUT) for name in FAMILIES), ("qwen3", BESIDE), ("qwen3", BASELINES)]
)
def test_nothing_that_conversion_adds_is_a_linear_layer(family: str, layers: tuple[str, ...]) -> None:
    model = tiny_model(family, layers)
    added = {name: module for name, module in model.named_modules() if name.rpartition(".")[2].startswith("sse_")}
    assert any(name.endswith("sse_router") for name in added) or layers == BASELINES
    assert added
    assert not [name for name, module in added.items() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("settings", QUANTISED)
def test_a_quantised_model_leaves_new_tensors_alone_and_saves_and_loads(settings: Any, folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings())
    assert quantised(model) == of_the_teacher(plain)
    again = folder.parent / "quantised"
    model.save_pretrained(again)  # before a forward: on CPUs bitsandbytes then packs four-bit weights anew
    found = logits(model)
    assert 0 < (found - logits(plain)).norm() < 0.5 * logits(plain).norm()
    loaded = load_pretrained(again)
    assert torch.equal(logits(loaded), found)
    ids, mask = prompts()
    new = loaded.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(new, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False))


@needs_torchao
def test_the_code_in_a_checkpoint_does_the_same(folder: Path) -> None:
    without_package(
        """
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig
settings = TorchAoConfig(Int8WeightOnlyConfig())
model = AutoModelForCausalLM.from_pretrained("converted", trust_remote_code=True, quantization_config=settings)
whole = {name for name, weight in model.named_parameters() if type(weight.data) is torch.Tensor}
assert any("sse_router" in name for name in whole) and any("sse_decay" in name for name in whole)
assert not any("q_proj" in name for name in whole)
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
ids = torch.arange(3, 20)[None]
assert torch.equal(again(ids).logits, model(ids).logits)
""",
        folder.parent,
    )


@needs_torchao
def test_torchao_by_itself_leaves_new_tensors_alone(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = load_pretrained(folder)
    expected = of_the_teacher(model)
    quantize_(model, Int8WeightOnlyConfig())
    assert quantised(model) - {"lm_head"} == expected


@needs_compressor
def test_llm_compressor_leaves_new_tensors_alone(folder: Path) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = load_pretrained(folder)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]))
    taken = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    assert taken == of_the_teacher(model)


@pytest.fixture
def saved(folder: Path) -> Path:
    """A folder as a quantised converted model leaves it; only its configuration and names matter."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {name.replace("q_proj.weight", "q_proj._weight_qdata"): tensor for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    synthetic.edit_config(folder, quantization_config={"quant_method": "awq"})
    return folder


def test_a_command_that_reads_whole_weights_says_that_a_folder_is_quantised(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is quantised \(awq\)") as caught:
        api.inspect(saved)
    assert "that this was made from" in caught.value.fix


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_a_library_that_is_missing_is_named(saved: Path) -> None:
    with pytest.raises(DependencyError, match="gptqmodel"):
        load_pretrained(saved)
