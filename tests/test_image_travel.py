"""Models of images and text go the whole way through the command line, and on to where the package is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sse_convert import api
from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError
from sse_convert.modeling.architectures import IMAGE_TEXT, has_experts
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_layers
from sse_convert.surgery.job import Job
from tests.modeling.tiny_images import IMAGE_MODELS, image_prompts, tiny_image_source, unless_broken
from tests.surgery.models import recipe, recipe_data, save_teacher, tokens
from tests.test_family_travel import ELSEWHERE, TWO_STEPS, does, elsewhere

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_checkpoint_with_older_names_and_fields_converts(tmp_path: Path) -> None:
    """Qwen2.5-VL on the hub has the language model's fields beside the others, and its tensors below `model.`."""
    source = save_teacher(tiny_image_source("qwen2_5_vl"), tmp_path / "teacher")
    assert any(name.startswith("model.layers.") for name in weights(source))
    path = source / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    path.write_text(json.dumps({**text, **config}))
    settings = recipe(source)
    report = api.convert(settings, tmp_path / "converted")
    assert report.unused_tensors == []
    api.verify(tmp_path / "converted", teacher=source)
    rows = [{"input_ids": tokens(), "position_ids": torch.arange(24).expand(2, -1)}]
    calibrate_checkpoint(Job.of(settings), tmp_path / "converted", tmp_path / "calibrated", rows=rows)
    api.verify(tmp_path / "calibrated", teacher=source)
    teacher = open_teacher(source)
    convert_layers(teacher, ["full"] * teacher.num_layers, {}, tmp_path / "same", recipe=settings)
    inputs = image_prompts("qwen2_5_vl")
    with torch.no_grad():
        made = load_pretrained(tmp_path / "same")(**inputs).logits
        assert torch.equal(made, tiny_image_source("qwen2_5_vl")(**inputs).logits)


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ("x", "does not describe a gemma3 model"),
        ({}, "lacks .* tensors that its config calls for"),
        ({"model_type": "llama"}, "the language model inside this gemma3 model is a llama"),
        ({"model_type": 5}, "the language model inside this gemma3 model is a 5"),
        ({"num_hidden_layers": -3}, "num_hidden_layers: -3 is too small"),
    ],
    ids=str,
)
def test_a_damaged_configuration_of_the_language_model_is_refused(inside: Any, told: str, tmp_path: Path) -> None:
    source = save_teacher(tiny_image_source("gemma3"), tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "text_config": inside}))
    with pytest.raises(CheckpointError, match=told):
        open_teacher(source)


ALIKE = ("qwen3_vl_moe", "qwen3_5", "qwen2_5_vl")
"""nothing in them that the others, and the checkpoint with older names, have not"""


@pytest.mark.parametrize(
    "model_type", [unless_broken(name, *([pytest.mark.experiment] if name in ALIKE else [])) for name in IMAGE_MODELS]
)
def test_a_model_of_images_and_text_travels(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, convert, verify, train all text weights for two steps, export; then, elsewhere, generate with images."""
    teacher = tiny_image_source(model_type)
    source = save_teacher(teacher, tmp_path / "teacher")
    for name in PROCESSOR:
        (source / name).write_text(json.dumps({"image_size": 8}))
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * i) % 80 + 3}" for i in range(400)))
    file, final = tmp_path / "recipe.yaml", tmp_path / "final"
    data = {"train": [{"path": str(tmp_path / "text.txt")}]}
    settings = recipe_data(source, stages=[{**TWO_STEPS, "train": "all"}], data=data, calibrate={"enabled": False})
    file.write_text(yaml.safe_dump({**settings, "export": {"dir": str(final)}}))
    planned = does(capsys, "plan", file)
    sees = sum(p.numel() for name, p in teacher.named_parameters() if IMAGE_TEXT[model_type].sees_images(name))
    idle = planned["parameters"] - planned["active_parameters"]
    assert idle > sees > 0 if has_experts(teacher.config) else idle == sees > 0
    does(capsys, "convert", file, "-o", tmp_path / "converted")
    proof = does(capsys, "verify", tmp_path / "converted", "--teacher", source)
    assert all(check["passed"] for check in proof["checks"])
    trained = does(capsys, "distill", file, "--checkpoint", tmp_path / "converted", "-o", tmp_path / "trained")
    assert trained["steps"] == 2
    does(capsys, "export", file, "--checkpoint", tmp_path / "trained", "-o", final)
    assert all((final / name).is_file() for name in (*PROCESSOR, "tokenizer.json", "chat_template.jinja"))
    card = (final / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "AutoModelForImageTextToText.from_pretrained(folder" in card
    model: Any = load_pretrained(final)
    seen = dict(model.named_parameters())
    changed = {name for name, before in teacher.named_parameters() if not torch.equal(before, seen[name])}
    assert changed
    assert not any(IMAGE_TEXT[model_type].sees_images(name) for name in changed)
    assert weights(source).keys() <= weights(final).keys()
    inputs = image_prompts(model_type)
    with torch.no_grad():
        logits = model(**inputs).logits
    made = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.save({"inputs": inputs, "logits": logits, "made": made}, tmp_path / "expected.pt")
    elsewhere(tmp_path, script=ELSEWHERE.replace("AutoModelForCausalLM", "transformers.AutoModelForImageTextToText"))
