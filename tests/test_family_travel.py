"""Every family goes the whole way through the real command line, and on to where `sse_convert` is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.modeling.auto import load_pretrained
from tests.elsewhere import without_package
from tests.modeling.tiny import ENTRIES, prompts
from tests.surgery.models import recipe_data, save_source

TWO_STEPS = {"name": "distill", "loss": "kl", "tokens": 64, "seq_len": 16, "batch_tokens": 32, "lr": 0.001}
ELSEWHERE = """
import json
from pathlib import Path
expected = torch.load("expected.pt")

def check(loaded):
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        assert torch.equal(model(**expected["inputs"]).logits, expected["logits"])
    made = model.generate(**expected["inputs"], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(made, expected["made"]), made
    return model

def code(folder):
    entries = json.loads(Path(folder, "config.json").read_text())["auto_map"]
    return entries, {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.py")}

model = check(AutoModelForCausalLM.from_pretrained("final", trust_remote_code=True, output_loading_info=True))
assert type(model).__module__.startswith("transformers_modules."), type(model)
model.save_pretrained("again")
assert code("again") == code("final")
check(type(model).from_pretrained("again", output_loading_info=True))
assert "sse_convert" not in sys.modules
Path("arrived").touch()
"""


def does(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """Run a command that must succeed; its JSON result."""
    code = run_app(app, [*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    result: dict[str, Any] = json.loads(out)["result"]
    return result


def elsewhere(folder: Path, script: str = ELSEWHERE) -> None:
    """Load, generate, save and load again where `sse_convert` cannot be imported."""
    without_package(script, folder)
    assert (folder / "arrived").is_file()


@pytest.mark.parametrize("model_type", ENTRIES)
def test_a_family_travels(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Convert, verify, train two steps, export; then, elsewhere, load, generate with left padding, save and load."""
    source = save_source(tmp_path / "teacher", model_type)
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * i) % 90 + 3}" for i in range(400)))
    recipe, final = tmp_path / "recipe.yaml", tmp_path / "final"
    data = {"train": [{"path": str(tmp_path / "text.txt")}]}
    settings = recipe_data(source, stages=[TWO_STEPS], data=data, calibrate={"enabled": False})
    recipe.write_text(yaml.safe_dump({**settings, "export": {"dir": str(final)}}))
    does(capsys, "convert", recipe, "-o", tmp_path / "converted")
    proof = does(capsys, "verify", tmp_path / "converted", "--teacher", source)
    assert all(check["passed"] for check in proof["checks"])
    trained = does(capsys, "distill", recipe, "--checkpoint", tmp_path / "converted", "-o", tmp_path / "trained")
    assert trained["steps"] == 2
    does(capsys, "export", recipe, "--checkpoint", tmp_path / "trained", "-o", final)
    ids, mask = prompts()
    inputs, model = {"input_ids": ids, "attention_mask": mask}, load_pretrained(final)
    with torch.no_grad():
        logits = model(**inputs).logits
    made = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.save({"inputs": inputs, "logits": logits, "made": made}, tmp_path / "expected.pt")
    elsewhere(tmp_path)
