"""Quantised checkpoints become bfloat16 ones: against what was quantised, and against transformers' own rules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from sse_convert import api
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError, OutputError
from sse_convert.surgery.dequantize import unscaled
from tests.surgery.models import recipe, save_source
from tests.surgery.synthetic import edit_config

BLOCK = (16, 16)


def by_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Float8 and scales of a matrix, blocks that do not fill it included."""
    rows, columns = weight.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    scale, out = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = weight[at].abs().max() / 448
            out[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def rewrite(folder: Path, change: Any, **quantization: Any) -> Path:
    """Replace every shard's tensors, and say in config.json how they are quantised."""
    weight_map = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = change(load_file(shard))
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_config(folder, quantization_config=quantization)
    return folder


def float8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            made[name], made[f"{name}_scale_inv"] = by_blocks(tensor.float(), BLOCK)
        else:
            made[name] = tensor
    return made


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A tiny DeepSeek V3 in float8; its projections are no multiples of a block."""
    source = save_source(tmp_path / "teacher", "deepseek_v3", dtype=torch.bfloat16)
    return rewrite(source, float8, quant_method="fp8", weight_block_size=list(BLOCK), activation_scheme="dynamic")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def test_float8_blocks(fp8: Path, tmp_path: Path) -> None:
    report = api.dequantize(fp8, tmp_path / "plain")
    old, new = tensors_of(fp8), tensors_of(tmp_path / "plain")
    assert new.keys() == {name for name in old if not name.endswith("_scale_inv")}
    assert report.dequantised_tensors == sum(tensor.dtype == torch.float8_e4m3fn for tensor in old.values()) > 20
    assert report.bytes == sum(tensor.nbytes for tensor in new.values())
    for name, tensor in new.items():
        if (scale := old.get(f"{name}_scale_inv")) is None:
            assert torch.equal(tensor, old[name])
            continue
        rows, columns = tensor.shape
        whole = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
        assert torch.equal(tensor, (old[name].float() * whole).bfloat16())
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert (tmp_path / "plain" / "tokenizer.json").read_bytes() == (fp8 / "tokenizer.json").read_bytes()


def test_the_copy_converts(fp8: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is quantised \(fp8\)"):
        open_teacher(fp8)
    api.dequantize(fp8, tmp_path / "plain")
    api.convert(recipe(tmp_path / "plain"), tmp_path / "out")
    api.verify(tmp_path / "out", teacher=tmp_path / "plain")


@pytest.mark.parametrize("block", [None, [16, 16]])
def test_float8_as_transformers_undoes_it(block: list[int] | None, tmp_path: Path) -> None:
    """Where transformers takes the sizes: blocks that fill every matrix, or one scale for all."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = dict(tensors)
        for name in tensors:
            if name.endswith("proj.weight"):
                whole = tuple(tensors[name].shape) if block is None else tuple(block)
                made[name], scale = by_blocks(tensors[name].float(), whole)
                made[f"{name}_scale_inv"] = scale.reshape(()) if block is None else scale
        return made

    source = save_source(tmp_path / "teacher", "qwen3", dtype=torch.bfloat16)
    scheme = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    rewrite(source, change, **scheme)
    api.dequantize(source, tmp_path / "plain")
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True, weight_block_size=block)}
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=2**-8, atol=0)


def test_mxfp4_experts_as_transformers_undoes_them(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, tensor in tensors.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, columns, rows = tensor.shape
                made[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
                made[f"{name}_scales"] = torch.randint(120, 128, (experts, rows, columns // 32), dtype=torch.uint8)
            else:
                made[name] = tensor
        return made

    sizes = {"hidden_size": 32, "intermediate_size": 64, "shard_size": "1GB"}
    source = rewrite(save_source(tmp_path / "teacher", "gpt_oss", **sizes), change, quant_method="mxfp4")
    report = api.dequantize(source, tmp_path / "plain")
    assert (report.method, report.dequantised_tensors) == ("mxfp4", 8)
    theirs = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True)).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    experts = [name for name in ours if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in experts)


def test_scales_of_rows_and_in_another_shape() -> None:
    weight = torch.randn(6, 5).to(torch.float8_e4m3fn)
    scale = torch.rand(6, 1) + 0.5
    assert torch.equal(unscaled(weight, scale, None, "w"), (weight.float() * scale).bfloat16())
    with pytest.raises(CheckpointError, match=r"w_scale_inv has shape \[6, 1\] for a weight of \[6, 5\]"):
        unscaled(weight, scale, (2, 2), "w")


def test_refusals(fp8: Path, tmp_path: Path) -> None:
    plain = save_source(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is not quantised"):
        api.dequantize(plain, tmp_path / "out")
    edit_config(plain, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"is quantised \(awq\)"):
        api.dequantize(plain, tmp_path / "out")
    edit_config(fp8, quantization_config={"quant_method": "fp8", "weight_block_size": [16, "x"]})
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        api.dequantize(fp8, tmp_path / "out")

    def without_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}

    edit_config(fp8, quantization_config="fp8")
    with pytest.raises(CheckpointError, match="has shape"):
        api.dequantize(fp8, tmp_path / "out")
    rewrite(fp8, without_scales, quant_method="fp8", weight_block_size=list(BLOCK))
    with pytest.raises(CheckpointError, match="is F8_E4M3 and has no scale of a known form"):
        api.dequantize(fp8, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="exists"):
        api.dequantize(fp8, plain)
