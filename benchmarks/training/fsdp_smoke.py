"""FSDP2 on two GPUs with a packaged recipe as it is: a few steps of each loss beside one GPU, a kill, an export.

    python benchmarks/training/fsdp_smoke.py qwen3-0.6b --config tests/fixtures/configs/qwen3-0.6b.json --out smoke.json
    python benchmarks/training/fsdp_smoke.py qwen3-8b --config tests/fixtures/configs/qwen3-8b.json --out smoke.json \\
        --parts distill-fsdp --batch-tokens 32768

The model has the configuration's shape and random weights, its text random words. The recipe changes in where model and
text come from and in `tokens` alone; its stages are `distill` as it stands, and beside it `align` (layer_mse) and, with
the rows of `long`, `uptrain` (ce). They run as a user starts them, `accelerate launch ... -m sse_convert`, and are
killed once they have made their steps, except where parts say otherwise:

    align-one, distill-one, uptrain-one      one GPU; the first two on GPU 0 in turn, the third on GPU 1 meanwhile
    distill-resumed                          FSDP2, killed after two steps, before the second is saved; continued to the
                                             end, exported, verified
    align-fsdp, distill-fsdp, uptrain-fsdp   FSDP2

`--tiny --launch=--multi_gpu` tries the script on two CPU processes, for which Accelerate has no FSDP.
"""

import argparse
import dataclasses as dc
import json
import os
import platform
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from sse_convert.recipe import load_recipe
from sse_convert.recipe.units import parse_count
from sse_convert.training.metrics import read

STEPS = 3
"""of each stage"""
FSDP = "--use_fsdp --fsdp_version 2"
SEVERAL = "--num_processes {} --num_machines 1 --mixed_precision no --dynamo_backend no"
"""what `accelerate launch` is told beside the kind, but for the number of processes"""
TWO = SEVERAL.format(2)
LAYERS = {"pattern": ["sse+sliding*3", "full"]}
"""weights are random: nothing could be chosen"""
WORDS = 4000
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 6000,
    "layer_types": None,
    "pad_token_id": 0,
}
TINY_ROW, TINY_STEP = 128, 512
"""tokens"""
PARTS = {
    "distill-one": ("distill", 0),
    "align-one": ("align", 0),
    "uptrain-one": ("uptrain", 1),
    "distill-resumed": ("distill", None),
    "uptrain-fsdp": ("uptrain", None),
    "align-fsdp": ("align", None),
    "distill-fsdp": ("distill", None),
}
"""part -> stage, and the GPU that it has to itself; None for all under FSDP2"""


@dc.dataclass(frozen=True)
class Setting:
    """What every part needs."""

    recipe: Path
    checkpoint: Path
    work: Path
    launch: list[str]
    step_tokens: dict[str, int]
    until: float
    """time.monotonic() at which everything ends"""


class Memory:
    """Most MiB in use on each visible GPU while it is open, as the driver reports it every half second; empty without
    one."""

    def __init__(self) -> None:
        self.most: list[int] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        command += [f"--id={visible}"] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
        while not self._closed.wait(0.5):
            now = [int(line) for line in subprocess.check_output(command, text=True).split()]
            self.most = [max(pair) for pair in zip(now, self.most or now, strict=True)]


def make_teacher(config_file: Path, folder: Path, tokenizer: PreTrainedTokenizerFast, *, tiny: bool) -> None:
    """Write a model of the configuration's shape with random bf16 weights."""
    settings = json.loads(config_file.read_text()) | (TINY if tiny else {})
    wide = 2 * settings["hidden_size"] ** -0.5  # logits spread by 2, or there would be little to tell apart
    settings |= {"eos_token_id": 0, "bos_token_id": None, "initializer_range": wide}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)
    torch.cuda.empty_cache()  # the parts' memory is counted
    tokenizer.save_pretrained(folder)


def make_text(folder: Path, documents: int) -> PreTrainedTokenizerFast:
    """Write documents of 40,000 random words each; returns a tokenizer that was trained on one of them."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(WORDS)]
    folder.mkdir(parents=True)
    for i in range(documents):
        (folder / f"{i}.txt").write_text(" ".join(chance.choices(words, k=40_000)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=5000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(folder / "0.txt")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_recipe(name: str, work: Path, arguments: argparse.Namespace) -> tuple[Path, dict[str, int]]:
    """Write the recipe with this model, this text and few tokens. Returns its file, and tokens per step by stage."""
    recipe = yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())
    recipe["layers"] = LAYERS
    distill, long = recipe["stages"]
    align = {"name": "align", "loss": "layer_mse", "train": "mixers", "lr": 1e-3, "batch_tokens": "32K"}
    recipe["stages"] = [{**align, "seq_len": distill["seq_len"]}, distill, {**long, "name": "uptrain", "loss": "ce"}]
    for stage in recipe["stages"]:
        if arguments.tiny:
            stage |= {"seq_len": TINY_ROW, "batch_tokens": TINY_STEP}
        if arguments.batch_tokens is not None:
            stage["batch_tokens"] = arguments.batch_tokens
        batch = stage["batch_tokens"]
        stage["tokens"] = STEPS * (batch if isinstance(batch, int) else parse_count(batch) or 0)
    recipe["model"] = str(work / "teacher")
    recipe["data"] = {"train": [{"path": str(work / "text")}]}
    recipe["export"] = {"dir": str(work / "exported")}
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path, {stage.name: stage.batch_tokens for stage in load_recipe(path).stages}


def run(setting: Setting, part: str, *, stop_at: int | None, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run a part's stage until it has logged this many steps, or to its end.

    Args:
        setting: recipe, checkpoint and folders.
        part: a key of PARTS.
        stop_at: step after which all its processes are killed; None waits for their end.
        options: of the command, beside its recipe and folders.
    """
    stage, gpu = PARTS[part]
    out = setting.work / part
    launch = ["accelerate.commands.launch", *setting.launch, "-m"] if gpu is None else []
    command = [sys.executable, "-m", *launch, "sse_convert", stage, str(setting.recipe), *options]
    command += ["-c", str(setting.checkpoint), "-o", str(out)]
    visible = {} if gpu is None or not torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    began, log = time.monotonic(), setting.work / f"{part}.log"
    with Memory() as memory, log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **visible})
        how = wait(process, out, stop_at, setting.until)
    place = out if out.is_dir() else out.with_name(f"{part}.work")
    records = read(place / "metrics.jsonl")
    print(f"{part}: {how}, {len(records)} steps, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "command": shlex.join(command[1:]),
        "ended": how,
        "seconds": time.monotonic() - began,
        "chosen": chosen(place),
        "peak_mib": memory.most if gpu is None else memory.most[gpu : gpu + 1],
        **figures(records, setting.step_tokens[stage]),
        **({} if how in ("finished", "killed") else {"log": log.read_text()[-20_000:]}),
    }


def wait(process: subprocess.Popen[bytes], out: Path, stop_at: int | None, until: float) -> str:
    """Watch a stage's log; returns how it ended. Its processes are gone then."""
    log = out.with_name(f"{out.name}.work") / "metrics.jsonl"
    try:
        while process.poll() is None:
            if stop_at is not None and len(read(log)) >= stop_at:
                return "killed"
            if time.monotonic() > until:
                return "out of time"
            time.sleep(0.05)
        return "finished" if process.returncode == 0 else f"failed with code {process.returncode}"
    finally:
        if process.poll() is None:
            kill(process)
            process.wait()


def kill(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started: workers are no part of its process group."""
    launcher = psutil.Process(process.pid)
    for one in [launcher, *launcher.children(recursive=True)]:
        one.kill()


def chosen(work: Path) -> dict[str, Any] | None:
    """What a stage's folder says of its passes; None before they were chosen."""
    path = work / "chosen.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def figures(records: Sequence[dict[str, Any]], step_tokens: int) -> dict[str, Any]:
    """Curves, and tokens per second of the median step after the first, which compiles kernels."""
    seconds = [record["seconds"] for record in records]
    warm = seconds[1:]
    return {
        "losses": [record["loss"] for record in records],
        "grad_norms": [record["grad_norm"] for record in records],
        "step_seconds": seconds,
        "step_tokens": step_tokens,
        "tokens_per_second": step_tokens / statistics.median(warm) if warm else None,
    }


def resumed(setting: Setting, part: str) -> dict[str, Any]:
    """A stage that is killed after its second step, before that is saved, and continued to its end; then exported."""
    saving = ["--set", f"stages.{PARTS[part][0]}.checkpoint_steps=1"]
    before = run(setting, part, stop_at=2, options=saving)
    if before["ended"] != "killed":
        return {"before": before}
    saved = sorted(path.name for path in (setting.work / f"{part}.work").glob("step-*"))
    after = run(setting, part, stop_at=None, options=saving)
    result = {"before": before, "saved": saved, "after": after}
    if after["ended"] == "finished":
        exported = setting.work / "exported"
        tool = [sys.executable, "-m", "sse_convert"]
        result["export"] = call(
            [*tool, "export", str(setting.recipe), "-c", str(setting.work / part), "-o", str(exported)]
        )
        result["verify"] = call([*tool, "verify", str(exported), "--json"])
    return result


def call(command: list[str]) -> dict[str, Any]:
    """Run a command to its end."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = {"code": done.returncode, "seconds": time.monotonic() - began}
    print(f"{command[3]}: code {done.returncode}, {said['seconds']:.0f} s", flush=True)
    return said if done.returncode == 0 else {**said, "log": (done.stdout + done.stderr)[-3000:]}


def compare(parts: dict[str, Any]) -> dict[str, Any]:
    """Largest relative differences of losses and gradient norms: one GPU and two, before the kill and after it."""
    pairs = {f"{stage}: one GPU, two": (f"{stage}-one", f"{stage}-fsdp") for stage in ("align", "distill", "uptrain")}
    flat = {**parts}
    if "distill-resumed" in parts:
        flat |= {f"distill-{key}": parts["distill-resumed"].get(key) for key in ("before", "after")}
        pairs |= {
            "distill: one GPU, two killed and continued": ("distill-one", "distill-after"),
            "distill: before the kill, after it": ("distill-before", "distill-after"),
        }
    found = {}
    for name, (one, two) in pairs.items():
        if flat.get(one) and flat.get(two):
            found[name] = {key: spread(flat[one][key], flat[two][key]) for key in ("losses", "grad_norms")}
    return found


def spread(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Largest relative difference of two curves, over the steps that both have."""
    return max((abs(b / a - 1) for a, b in zip(one, two, strict=False)), default=None)


def measure(setting: Setting, wanted: list[str], save: Any) -> None:
    """Run the parts: those of one GPU beside each other, the others in turn."""
    alone = [part for part in wanted if PARTS[part][1] is not None]

    def in_turn(gpu: int) -> None:
        for part in alone:
            if PARTS[part][1] == gpu:
                save(part, run(setting, part, stop_at=STEPS))

    threads = [threading.Thread(target=in_turn, args=(gpu,)) for gpu in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in wanted:
        if part not in alone and time.monotonic() < setting.until:
            save(part, resumed(setting, part) if part == "distill-resumed" else run(setting, part, stop_at=STEPS))


def unwind_when_terminated() -> None:
    """Let a termination end this process by an exception, so that the stages that it started end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def surroundings() -> dict[str, Any]:
    """Devices, versions, date."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a packaged recipe")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the shape")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--work", type=Path, default=Path("/tmp/fsdp_smoke"), help="folder to make or use")
    parser.add_argument("--parts", nargs="*", default=list(PARTS)[:-1], choices=PARTS, help="none only prepares")
    parser.add_argument("--batch-tokens", type=int, help="tokens of a step, where the recipe's own are too many")
    parser.add_argument("--launch", default=FSDP, help="how `accelerate launch` runs the others")
    parser.add_argument("--commit", default="", help="to record")
    parser.add_argument("--seconds", type=float, default=3600, help="end after these")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    arguments = parser.parse_args()
    unwind_when_terminated()
    began = time.monotonic()
    checkpoint = arguments.work / "converted"
    prepared = checkpoint.is_dir()
    if not prepared:
        tokenizer = make_text(arguments.work / "text", 4 if arguments.tiny else 20)
        make_teacher(arguments.config, arguments.work / "teacher", tokenizer, tiny=arguments.tiny)
    recipe, step_tokens = make_recipe(arguments.recipe, arguments.work, arguments)
    if not prepared:
        call([sys.executable, "-m", "sse_convert", "convert", str(recipe), "-o", str(checkpoint)])
    print(f"prepared after {time.monotonic() - began:.0f} s", flush=True)
    ran = yaml.safe_load(recipe.read_text())
    result: dict[str, Any] = {
        "recipe": arguments.recipe,
        **{key: ran[key] for key in ("layers", "mixers", "stages") if key in ran},
    }
    result |= {"commit": arguments.commit, **surroundings(), "parts": {}}
    launch = shlex.split(f"{arguments.launch} {TWO}")
    setting = Setting(recipe, checkpoint, arguments.work, launch, step_tokens, began + arguments.seconds)
    lock = threading.Lock()

    def save(part: str, found: dict[str, Any]) -> None:
        with lock:
            result["parts"][part] = found
            result["relative_differences"] = compare(result["parts"])
            arguments.out.write_text(json.dumps(result, indent=1))

    measure(setting, arguments.parts, save)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
