"""Peak memory of training stages on true shapes, which `plan`'s estimate is held against; the paper's too.

    python benchmarks/training/peaks.py --out out/peaks.json
    python benchmarks/training/peaks.py --out out/peaks.json --settings 8b-lora-kl --seconds 240
    python benchmarks/training/peaks.py --out out/peaks.json --settings paper-2b-ce paper-12b-kl --seconds 120

Weights and text are random. A setting is one stage of a packaged recipe, changed only in what the setting says; it runs
as a user starts it, and is killed after some steps. The JSON is written anew after each setting, and keeps those that
it has and that are not asked for. `--tiny` tries the script on a CPU.
"""

import argparse
import dataclasses as dc
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from fsdp_smoke import TINY, TINY_ROW, TINY_STEP, call, make_teacher, make_text, surroundings, unwind_when_terminated
from throughput import run_stage

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.choosing import draft_recipe

CONFIGS = Path("tests/fixtures/configs")
SHORT = {"batch_tokens": "32K"}
"""a step that takes seconds; a pass does not depend on it, but for having no more rows"""
LORA = {"train": "lora", "lr": 1e-4}
ALIGN = {"name": "align", "loss": "layer_mse", "train": "mixers", "tokens": "20M", "seq_len": "4K", "lr": 1e-3, **SHORT}
COMMANDS = {"layer_mse": "align", "kl": "distill", "ce": "uptrain"}
FEW_LAYERS = {"num_hidden_layers": 9, "max_window_layers": 9, "layer_types": None}
QUARTER = {"num_hidden_layers": 10}
MIXTURE = {"num_hidden_layers": 12, "max_window_layers": 12}
PADDED = {"num_hidden_layers": 8, "layer_types": None, "pad_token_id": 0}


@dc.dataclass(frozen=True)
class Setting:
    """One stage to measure."""

    recipe: str
    """a packaged recipe"""
    stage: str
    """name of the one stage that is kept"""
    changes: dict[str, Any] = dc.field(default_factory=dict)
    """of the stage"""
    config: dict[str, Any] = dc.field(default_factory=dict)
    """what config.json has instead; None removes a field"""
    compiled: bool = False
    way: str = ""
    """a key of throughput.WAYS"""
    steps: int = 3


SETTINGS = {
    "0.6b-kl": Setting("qwen3-0.6b", "distill", compiled=True, steps=5),
    "0.6b-kl-checkpointed": Setting("qwen3-0.6b", "distill", {**SHORT, "gradient_checkpointing": True}),
    "0.6b-long": Setting("qwen3-0.6b", "long", SHORT, steps=2),
    "0.6b-layer-mse": Setting("qwen3-0.6b", "align", ALIGN),
    "8b-kl": Setting("qwen3-8b", "distill", compiled=True, steps=4),
    "8b-long": Setting("qwen3-8b", "long", SHORT, steps=2),
    "8b-kl-fsdp": Setting("qwen3-8b", "distill", compiled=True, way="fsdp", steps=4),
    "8b-lora-kl": Setting("qwen3-8b", "distill", {**LORA, **SHORT}),
    "8b-lora-long": Setting("qwen3-8b", "long", {**LORA, **SHORT}, steps=2),
    "8b-quarter-kl": Setting("qwen3-8b", "distill", SHORT, FEW_LAYERS, compiled=True, steps=4),
    "8b-quarter-long": Setting("qwen3-8b", "long", SHORT, FEW_LAYERS, steps=2),
    "0.6b-kl-fsdp": Setting("qwen3-0.6b", "distill", SHORT, way="fsdp"),
    "8b-lora-kl-fsdp": Setting("qwen3-8b", "distill", {**LORA, **SHORT}, way="fsdp"),
    "8b-quarter-kl-fsdp": Setting("qwen3-8b", "distill", SHORT, FEW_LAYERS, way="fsdp"),
    "1.7b-kl": Setting("qwen3-1.7b", "distill", SHORT),
    "1.7b-long": Setting("qwen3-1.7b", "long", SHORT, steps=2),
    "4b-kl": Setting("qwen3-4b", "distill", SHORT),
    "4b-long": Setting("qwen3-4b", "long", SHORT, steps=2),
    "14b-quarter-kl": Setting("qwen3-14b", "distill", SHORT, QUARTER),
    "14b-quarter-long-fsdp": Setting("qwen3-14b", "long", {"batch_tokens": "64K"}, QUARTER, way="fsdp", steps=2),
    "smollm2-kl": Setting("smollm2-135m", "distill", SHORT),
    "smollm2-long": Setting("smollm2-135m", "long", SHORT, steps=2),
    "llama-1b-kl": Setting("llama-3.2-1b", "distill", SHORT),
    "llama-1b-long": Setting("llama-3.2-1b", "long", SHORT, steps=2),
    "llama-3b-kl": Setting("llama-3.2-3b", "distill", SHORT),
    "llama-8b-quarter-kl": Setting("llama-3.1-8b", "distill", SHORT, {"num_hidden_layers": 8}),
    "llama-8b-quarter-long": Setting("llama-3.1-8b", "long", SHORT, {"num_hidden_layers": 8}, steps=2),
    "30b-quarter-kl": Setting("qwen3-30b-a3b", "distill", SHORT, MIXTURE),
    "gpt-oss-third-kl": Setting("gpt-oss-20b", "distill", SHORT, PADDED),
    "30b-quarter-long": Setting("qwen3-30b-a3b", "long", SHORT, MIXTURE, steps=2),
    "gpt-oss-third-long": Setting("gpt-oss-20b", "long", SHORT, PADDED, steps=2),
    "paper-2b-kl": Setting("paper-2b", "distill", SHORT, steps=2),
    "paper-2b-ce": Setting("paper-2b", "uptrain", {"batch_tokens": "128K"}, steps=2),
    "paper-12b-kl": Setting("paper-12b", "distill", SHORT, QUARTER, steps=2),
    "paper-12b-ce": Setting("paper-12b", "uptrain", SHORT, QUARTER, steps=2),
}


def shape(setting: Setting, work: Path, *, tiny: bool) -> Path:
    """Make the converted checkpoint of a setting's shape unless another setting has; its folder."""
    raw = json.loads((CONFIGS / f"{setting.recipe}.json").read_text()) | setting.config | (TINY if tiny else {})
    name = setting.recipe + "".join(f"-{key}-{value}" for key, value in setting.config.items() if value is not None)
    folder = work / name
    if (folder / "converted").is_dir():
        return folder
    for other in work.glob("*/converted"):
        shutil.rmtree(other.parent)  # the disk holds one of the large ones
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_text(folder / "text", 4 if tiny else 20)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    make_teacher(folder / "config.json", folder / "teacher", tokenizer, tiny=tiny)
    recipe = make_recipe(setting, folder, tiny=tiny)
    convert = [sys.executable, "-m", "sse_convert", "convert", str(recipe), "-o", str(folder / "converted")]
    call([*convert, "--link", "hard", "--defer-digests"])
    return folder


def make_recipe(setting: Setting, folder: Path, *, tiny: bool) -> Path:
    """Write the recipe of one stage with this model and this text; what is still to be chosen is spread evenly."""
    recipe = yaml.safe_load(Path(f"recipes/{setting.recipe}.yaml").read_text())
    teacher = open_for_planning(str(folder / "teacher"))
    draft = draft_recipe(recipe_from_dict(recipe), teacher.num_layers, teacher.separable_heads)
    recipe["layers"] = draft.to_dict()["layers"]
    kept = next((stage for stage in recipe["stages"] if stage["name"] == setting.stage), {})
    stage = {**kept, **setting.changes}
    if tiny:
        stage |= {"seq_len": TINY_ROW, "batch_tokens": TINY_STEP, "tokens": "20M"}
    recipe |= {"stages": [stage], "model": str(folder / "teacher"), "calibrate": {"enabled": False}}
    recipe |= {"data": {"train": [{"path": str(folder / "text")}]}, "eval": {"tokens": 0}}
    recipe |= {"export": {"dir": str(folder / "exported")}, "train": {"compile": setting.compiled and not tiny}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def measure(name: str, work: Path, until: float, *, tiny: bool) -> dict[str, Any]:
    """Run a setting's stage; what it was, what it chose and the most memory it had."""
    setting = SETTINGS[name]
    folder = shape(setting, work, tiny=tiny)
    recipe = make_recipe(setting, folder, tiny=tiny)
    written = yaml.safe_load(recipe.read_text())
    part = COMMANDS[written["stages"][0]["loss"]] + f"-{setting.way}" * bool(setting.way)
    shutil.rmtree(folder / f"{part}.work", ignore_errors=True)
    found = run_stage(part, recipe, folder, setting.steps, until)
    return {
        "recipe": setting.recipe,
        "config": {**setting.config, **(TINY if tiny else {})},
        "stage": written["stages"][0],
        "layers": written["layers"],
        "mixers": written.get("mixers", {}),
        "sharded": setting.way.startswith("fsdp"),
        "gpu_mib": [torch.cuda.get_device_properties(i).total_memory >> 20 for i in range(torch.cuda.device_count())],
        **found,
    }


def main() -> None:
    """Measure settings in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write, or to add to")
    parser.add_argument("--work", type=Path, default=Path("/tmp/peaks"), help="folder to make or use")
    alone = [name for name, setting in SETTINGS.items() if not setting.way]
    parser.add_argument("--settings", nargs="*", default=alone, choices=SETTINGS, help="default: those of one GPU")
    parser.add_argument("--commit", default="", help="to record")
    parser.add_argument("--seconds", type=float, default=240, help="for each setting")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    arguments = parser.parse_args()
    unwind_when_terminated()
    result = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"settings": {}}
    for name in sorted(arguments.settings, key=list(SETTINGS).index):
        began = time.monotonic()
        found = measure(name, arguments.work, began + arguments.seconds, tiny=arguments.tiny)
        took = {"seconds": time.monotonic() - began, "commit": arguments.commit, **surroundings()}
        result["settings"][name] = {**found, **took, "settings_command": shlex.join(["python", *sys.argv])}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1))
        shown = {key: found.get(key) for key in ("ended", "peak_mib", "chosen", "step_seconds", "losses", "log")}
        print(name, f"{took['seconds']:.0f} s", json.dumps(shown), flush=True)


if __name__ == "__main__":
    sys.exit(main())
