"""Peak memory of training stages on a CPU, which `plan`'s estimate is held against.

    python -m benchmarks.training.cpu_peaks my-smollm2 --text my-text.jsonl --out out/cpu_peaks.json

Each setting is a stage of recipe smollm2-135m-heads, changed in what the setting says, that runs for two steps.
Rows of a whole run are the peaks of `sse-convert run` after its stages, of a recipe by `recipes new` with 9 heads kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

RECIPE, STEPS = "smollm2-135m-heads", 2
MIXERS = {"train": "mixers", "lr": {"mixers": 1.4e-3, "new": 8.0e-3}}
SETTINGS = {
    "512": {"seq_len": 512, "batch_tokens": 512},
    "4 x 512": {"seq_len": 512, "batch_tokens": 2048},
    "2048": {"seq_len": 2048, "batch_tokens": 2048},
    "2048, converted layers alone": {"seq_len": 2048, "batch_tokens": 2048, **MIXERS},
}


def measure(setting: dict[str, Any], model: str, text: str, folder: Path) -> dict[str, Any]:
    """Run a stage in a process of its own: its peak resident bytes."""
    stage = {
        "name": "distill",
        "loss": "kl",
        "optimizer": "muon",
        "lr": {"mixers": 1.4e-3, "new": 8.0e-3, "rest": 2.8e-4},
    }
    stage |= setting | {"tokens": STEPS * setting["batch_tokens"]}
    stages = json.dumps([stage])
    changes = [f"model={model}", f"stages={stages}", f"data.train=[{{path: {text}}}]", "data.valid=[]", "eval.tokens=0"]
    changes += ["eval.needle=null"]
    options = [word for change in changes for word in ("--set", change)]
    if not (folder / "converted").exists():
        command = [sys.executable, "-m", "sse_convert", "convert", RECIPE, "-o", str(folder / "converted"), *options]
        subprocess.run(command, check=True)
    out = Path(tempfile.mkdtemp(dir=folder)) / "trained"
    run = [sys.executable, "-m", "sse_convert", "distill", RECIPE, "-c", str(folder / "converted"), "-o", str(out)]
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)"
    )
    told = subprocess.run([sys.executable, "-c", code, *run, *options], check=True, stdout=subprocess.PIPE, text=True)
    return {"stage": stage, "peak_bytes": int(told.stdout.rpartition("peak ")[2])}


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="to record")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"commit": arguments.commit, "torch": torch.__version__, "settings": {}}
    if arguments.out.is_file():
        found = json.loads(arguments.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in SETTINGS if name not in found["settings"]]:
            setting = SETTINGS[name]
            found["settings"][name] = measure(setting, arguments.model, arguments.text, Path(folder))
            arguments.out.write_text(json.dumps(found, indent=1))
            print(name, found["settings"][name], flush=True)


if __name__ == "__main__":
    main()
