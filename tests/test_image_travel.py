"""Every model of images and text goes the whole way through the command line, and on to where the package is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sse_convert.modeling.architectures import IMAGE_TEXT, has_experts
from sse_convert.modeling.auto import load_pretrained
from tests.modeling.tiny_images import IMAGE_MODELS, image_prompts, tiny_image_source
from tests.surgery.models import recipe_data, save_teacher
from tests.test_family_travel import ELSEWHERE, TWO_STEPS, does, elsewhere

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_a_model_of_images_and_text_travels(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, convert, verify, train all text weights for two steps, export; then, elsewhere, generate with images."""
    teacher = tiny_image_source(model_type)
    source = save_teacher(teacher, tmp_path / "teacher")
    for name in PROCESSOR:
        (source / name).write_text(json.dumps({"image_size": 8}))
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * i) % 80 + 3}" for i in range(400)))
    recipe, final = tmp_path / "recipe.yaml", tmp_path / "final"
    data = {"train": [{"path": str(tmp_path / "text.txt")}]}
    settings = recipe_data(source, stages=[{**TWO_STEPS, "train": "all"}], data=data)
    recipe.write_text(yaml.safe_dump({**settings, "export": {"dir": str(final)}}))
    planned = does(capsys, "plan", recipe)
    sees = sum(p.numel() for name, p in teacher.named_parameters() if IMAGE_TEXT[model_type].sees_images(name))
    idle = planned["parameters"] - planned["active_parameters"]
    assert idle > sees > 0 if has_experts(teacher.config) else idle == sees > 0
    does(capsys, "convert", recipe, "-o", tmp_path / "converted")
    proof = does(capsys, "verify", tmp_path / "converted", "--teacher", source)
    assert all(check["passed"] for check in proof["checks"])
    does(capsys, "calibrate", recipe, "--checkpoint", tmp_path / "converted", "-o", tmp_path / "calibrated")
    trained = does(capsys, "distill", recipe, "--checkpoint", tmp_path / "calibrated", "-o", tmp_path / "trained")
    assert trained["steps"] == 2
    does(capsys, "export", recipe, "--checkpoint", tmp_path / "trained", "-o", final)
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
    elsewhere(tmp_path, ELSEWHERE.replace("AutoModelForCausalLM", "transformers.AutoModelForImageTextToText"))
