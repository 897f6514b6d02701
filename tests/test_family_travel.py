"""Families go the whole way through the real command line, and on to where `sse_convert` is not installed."""

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
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
TRAVEL = ("llama", "gpt2", "gpt_neox", "phi3", "gpt_oss", "gemma4_text", "llama4_text", "deepseek_v3")
"""one for each way of storing and attending: q, k and v apart, transposed, by heads, in blocks; sinks, keys as values,
chunks, latents"""
TOGETHER = 4
"""families that share a process elsewhere"""
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


def elsewhere(*folders: Path, script: str = ELSEWHERE) -> None:
    """In each folder load, generate, save and load again, in one process that cannot import `sse_convert`."""
    visit = f"import os\nfor place in sys.argv[1:]:\n    print(place)\n    os.chdir(place)\n{indent(script, '    ')}"
    without_package(visit, folders[0], *map(str, folders))
    assert all((folder / "arrived").is_file() for folder in folders)


def grouped(families: Sequence[str]) -> list[Sequence[str]]:
    return [families[i : i + TOGETHER] for i in range(0, len(families), TOGETHER)]


OTHERS = tuple(name for name in ENTRIES if name not in TRAVEL)


@pytest.mark.parametrize(
    "families",
    [
        *grouped(TRAVEL),
        *(pytest.param(families, marks=pytest.mark.experiment) for families in grouped(OTHERS)),
    ],
    ids=", ".join,
)
def test_families_travel(families: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Convert, verify, train two steps, export; then, elsewhere, load, generate with left padding, save and load."""
    for family in families:
        travels(family, tmp_path / family, capsys)
    elsewhere(*(tmp_path / family for family in families))


def travels(model_type: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way of one family through the command line, up to what it is expected to say elsewhere."""
    source = save_source(folder / "teacher", model_type)
    (folder / "text.txt").write_text(" ".join(f"w{(i * i) % 90 + 3}" for i in range(400)))
    recipe, final = folder / "recipe.yaml", folder / "final"
    data = {"train": [{"path": str(folder / "text.txt")}]}
    settings = recipe_data(source, stages=[TWO_STEPS], data=data, calibrate={"enabled": False})
    recipe.write_text(yaml.safe_dump({**settings, "export": {"dir": str(final)}}))
    does(capsys, "convert", recipe, "-o", folder / "converted")
    proof = does(capsys, "verify", folder / "converted", "--teacher", source)
    assert all(check["passed"] for check in proof["checks"])
    trained = does(capsys, "distill", recipe, "--checkpoint", folder / "converted", "-o", folder / "trained")
    assert trained["steps"] == 2
    does(capsys, "export", recipe, "--checkpoint", folder / "trained", "-o", final)
    ids, mask = prompts()
    inputs, model = {"input_ids": ids, "attention_mask": mask}, load_pretrained(final)
    with torch.no_grad():
        logits = model(**inputs).logits
    made = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.save({"inputs": inputs, "logits": logits, "made": made}, folder / "expected.pt")
