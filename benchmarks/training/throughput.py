"""Tokens per second of a recipe beside this file, on one or two GPUs, beside the same KL step of plain transformers.

    python benchmarks/training/throughput.py qwen3-0.6b --out out.json \\
        --config tests/fixtures/configs/qwen3-0.6b.json
    python benchmarks/training/throughput.py qwen3-0.6b --out out.json \\
        --config tests/fixtures/configs/qwen3-1.7b.json --parts uptrain --row 131072
    python benchmarks/training/throughput.py qwen3-8b --out out.json \\
        --config tests/fixtures/configs/qwen3-8b.json --parts distill-fsdp distill-fsdp-eager

The model has the configuration's shape and random weights, its text random words, or with `--text` that of files, in
the tokens of `--tokenizer`; the recipe changes in where model and
text come from alone. Its stages run as a user starts them and are killed after some steps. Parts:

    distill, uptrain   the recipe's stages on one GPU; on two as `distill-ddp`, `distill-fsdp` (FSDP2) and, with
                       `train.compile: false`, `distill-fsdp-eager`, which share out the rows of a step, and as
                       `uptrain-context`, with half of each row on either
    plain              transformers alone: all layers softmax (SDPA), student in float32 under bf16 autocast, teacher in
                       bf16, both compiled layer by layer, activations kept, the same rows of a step, the same chunked
                       loss, AdamW; the first of `--rows` that fits the GPU, of passes of 32K tokens at most
    plain-uptrain      the same beside `uptrain`: cross entropy, no teacher
    trl-uptrain        SFTTrainer of TRL on the same rows (`trl_step.py`), where TRL is installed

The share of the peak counts the FLOPs of `sse-convert plan`: a forward pass of the teacher, three of the student,
attention among them, nothing computed twice. Losses of a stage are set beside those of its first part. `--tiny` tries
the script on a CPU. Rows of 32K of the 0.5B coder, on one GPU and on two:

    python benchmarks/training/throughput.py coder --config CODER/config.json --tokenizer CODER --text TEXT \\
        --parts uptrain uptrain-fsdp uptrain-context plain-uptrain --steps 20 --out out/coder.json
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from estimates import PEAK, PEERS, TRL
from fsdp_smoke import (
    FSDP,
    TINY_ROW,
    TINY_STEP,
    TWO,
    Memory,
    chosen,
    make_teacher,
    make_text,
    surroundings,
    unwind_when_terminated,
    wait,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.mixers import FULL
from sse_convert.modeling.head import Head
from sse_convert.recipe import load_recipe, resolve
from sse_convert.recipe.overrides import apply_overrides
from sse_convert.recipe.schema import Recipe
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.speed import training_flops
from sse_convert.training.compiling import compile_layers
from sse_convert.training.losses import linear_cross_entropy, linear_kl
from sse_convert.training.metrics import read

WARM = 2
"""steps that compile"""
PLAIN_TOKENS = 1 << 15
"""of a pass of the plain step, unless one row is longer"""
WAYS = {
    "": ("", ""),
    "ddp": ("--multi_gpu", ""),
    "fsdp": (FSDP, ""),
    "fsdp-eager": (FSDP, "--set train.compile=false"),
    "context": (FSDP, "--set stages.{stage}.context_parallel=2"),
}
"""how a part's name ends -> what `accelerate launch` is told (none for one process), and options of the stage"""


def make_config(config: Path, work: Path, row: int | None) -> Path:
    """Write the shape's config.json with positions for rows of so many tokens; None leaves them as they are."""
    shape = json.loads(config.read_text())
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], row or 0)
    path = work / "config.json"
    path.write_text(json.dumps(shape))
    return path


def make_recipe(name: str, changes: list[str], work: Path, row: int | None, text: list[Path], *, tiny: bool) -> Path:
    """Write the recipe with this model and this text; in the stage of text alone two rows a step, of so many tokens."""
    base = yaml.safe_load(Path(f"benchmarks/training/{name}.yaml").read_text())
    recipe, _ = apply_overrides(base, changes)
    recipe["model"] = str(work / "teacher")
    sources = [{"path": str(path.absolute())} for path in text or [work / "text"]]
    recipe["data"] = {"train": sources, "needles": recipe["data"].get("needles", {})}
    recipe["export"] = {"dir": str(work / "exported")}
    if tiny:
        recipe["layers"] = {"pattern": recipe["layers"]["pattern"]}
        recipe["data"].pop("needles")
        for stage in recipe["stages"]:
            stage |= {"seq_len": TINY_ROW, "batch_tokens": TINY_STEP, "micro_batch": "auto"}
    for stage in recipe["stages"]:
        if row is not None and stage["loss"] == "ce":
            stage |= {"seq_len": row, "batch_tokens": 2 * row}
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_stage(part: str, recipe: Path, work: Path, steps: int, until: float) -> dict[str, Any]:
    """Start a stage as a user does, and kill it after some steps.

    Args:
        part: the stage's command, and behind a hyphen a key of WAYS.
        recipe: its file.
        work: folder with the converted checkpoint.
        steps: after which it is killed.
        until: time.monotonic() at which it is killed in any case.
    """
    out, log = work / part, work / f"{part}.log"
    stage, _, way = part.partition("-")
    kind, options = WAYS[way]
    launch = ["-m", "accelerate.commands.launch", *shlex.split(f"{kind} {TWO}")] if kind else []
    command = [sys.executable, *launch, "-m", "sse_convert", stage, str(recipe)]
    command += shlex.split(options.format(stage=stage))
    command += ["-c", str(work / "converted"), "-o", str(out)]
    with Memory() as memory, log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        how = wait(process, out, steps, until)
    place = out.with_name(f"{part}.work")
    records = read(place / "metrics.jsonl")
    return {
        "command": shlex.join(command[1:]),
        "ended": how,
        "chosen": chosen(place),
        "peak_mib": memory.most,
        "step_seconds": [record["seconds"] for record in records],
        "losses": [record["loss"] for record in records],
        **({} if how == "killed" else {"log": log.read_text()[-3000:]}),
    }


def loss_of(part: str) -> str:
    """The loss of a part's stage."""
    return "ce" if "uptrain" in part else "kl"


def plain_step(student: Any, teacher: Any | None, rows: torch.Tensor, total: int) -> None:
    """Forward and backward over the tokens of the whole step: of the KL to a teacher, without one of cross entropy."""
    device = rows.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = student.base_model(input_ids=rows, use_cache=False).last_hidden_state
        if teacher is None:
            loss = linear_cross_entropy(hidden[:, :-1].flatten(0, 1), Head.of(student), rows[:, 1:].flatten())
        else:
            with torch.no_grad():
                expected = teacher.base_model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
            loss = linear_kl(hidden.flatten(0, 1), Head.of(student), expected, Head.of(teacher))
    (loss / total).backward()


def run_plain(recipe: Recipe, loss: str, rows: int, steps: int) -> list[float]:
    """Seconds of each step of plain transformers, of so many rows a pass."""
    stage = next(stage for stage in recipe.stages if stage.loss == loss)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    student: nn.Module = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).to(device).train()
    teacher = None
    if loss == "kl":
        teacher = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.bfloat16 if cuda else torch.float32)
        teacher = teacher.to(device).requires_grad_(False)
    for model in (student, teacher) if cuda else ():
        if model is not None:
            compile_layers(model)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-5, fused=cuda)
    tokens = torch.randint(5, 4000, (stage.batch_tokens // stage.seq_len, stage.seq_len), device=device)
    seconds = []
    for _ in range(steps):
        began = time.monotonic()
        for part in tokens.split(rows):
            plain_step(student, teacher, part, tokens.numel())
        nn.utils.clip_grad_norm_(student.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return seconds


def peer(part: str, arguments: argparse.Namespace, recipe: Path, loss: str, until: float) -> dict[str, Any]:
    """A step with softmax layers alone in a process of its own, with the first number of rows that fits."""
    tried: dict[int, str] = {}
    length = next(stage.seq_len for stage in load_recipe(recipe).stages if stage.loss == loss)
    steps, work = str(arguments.steps), str(arguments.work)
    for rows in [rows for rows in arguments.rows if rows * length <= PLAIN_TOKENS] or [1]:
        command = [sys.executable, __file__, arguments.recipe, "--work", work, "--plain", str(rows)]
        command += ["--loss", loss, "--steps", steps]
        if part == TRL:
            trainer = Path(__file__).with_name("trl_step.py")
            command = [sys.executable, str(trainer), str(recipe), str(rows), steps, "--work", f"{work}/{TRL}"]
        with Memory() as memory:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=max(1.0, until - time.monotonic())
            )
        found = {"command": shlex.join(command[1:]), "peak_mib": memory.most, "rows": rows}
        if done.returncode == 0:
            return {**found, "step_seconds": json.loads(done.stdout.splitlines()[-1]), "too_many_rows": tried}
        tried[rows] = done.stderr[-800:]
    return {"step_seconds": [], "too_many_rows": tried}


def figures(found: dict[str, Any], recipe: Recipe, loss: str, gpus: int, *, softmax: bool) -> dict[str, Any]:
    """Tokens per second of the median step after the first ones, which compile, and the share of the GPUs' peak."""
    stage = next(stage for stage in recipe.stages if stage.loss == loss)
    teacher = open_teacher(recipe.model)
    names, mixers = resolve(recipe, teacher.num_layers)
    layers = [None if softmax or name == FULL else mixers[name] for name in names]
    flops = training_flops(stage, geometry_of(teacher), layers)
    warm = found["step_seconds"][WARM:]
    rate = stage.batch_tokens / statistics.median(warm) if warm else None
    return {
        **found,
        "seq_len": stage.seq_len,
        "batch_tokens": stage.batch_tokens,
        "flops_per_token": flops,
        "tokens_per_second": rate,
        "share_of_peak": rate and rate * flops / PEAK / gpus,
    }


def prepare(arguments: argparse.Namespace, path: Path) -> None:
    """Make text, teacher and converted checkpoint, unless they are there, and the recipe."""
    work, done = arguments.work, arguments.work / "converted"
    work.mkdir(parents=True, exist_ok=True)
    if not done.is_dir():
        if arguments.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        else:
            tokenizer = make_text(work / "text", 4 if arguments.tiny else 20)
        make_teacher(
            make_config(arguments.config, work, arguments.row), work / "teacher", tokenizer, tiny=arguments.tiny
        )
    make_recipe(arguments.recipe, arguments.set, work, arguments.row, arguments.text, tiny=arguments.tiny)
    if not done.is_dir():
        convert = [sys.executable, "-m", "sse_convert", "convert", str(path), "-o", str(done)]
        subprocess.run(convert, check=True, capture_output=True)


def apart(parts: dict[str, Any]) -> dict[str, float]:
    """How far the losses of each part are from those of its stage's first one, at most, as a share."""
    found = {}
    for name, part in parts.items():
        first = next(other for other in parts if other.partition("-")[0] == name.partition("-")[0])
        pairs = zip(parts[first].get("losses", ()), part.get("losses", ()), strict=False)
        if name != first:
            found[f"{name} beside {first}"] = max((abs(b / a - 1) for a, b in pairs), default=float("nan"))
    return found


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Arguments that say what is measured."""
    p = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="name of a recipe in this folder, which names its layers")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--config", type=Path, help="config.json of the shape")
    p.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of `--text`")
    p.add_argument("--text", type=Path, nargs="*", default=[], help="files of real text")
    p.add_argument("--work", type=Path, default=Path("/tmp/throughput"), help="folder to make or use")
    p.add_argument("--row", type=int, help="tokens of uptrain's rows, two a step; default: the recipe's")
    p.add_argument("--commit", default="", help="to record")
    p.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    return p


def parser() -> argparse.ArgumentParser:
    p = parser_of(__doc__)
    p.add_argument("--out", type=Path, help="JSON to write")
    p.add_argument("--parts", nargs="*", default=["distill", "plain", "uptrain"], help="in this order")
    p.add_argument("--steps", type=int, default=6, help="of each part")
    p.add_argument("--rows", type=int, nargs="*", default=[8, 4], help="of a pass of the plain step")
    p.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    p.add_argument("--loss", choices=("kl", "ce"), help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, default=3600, help="end after these")
    return p


def main() -> None:
    arguments = parser().parse_args()
    unwind_when_terminated()
    path = arguments.work / "recipe.yaml"
    if arguments.plain is not None:
        print(json.dumps(run_plain(load_recipe(path), arguments.loss, arguments.plain, arguments.steps)))
        return
    until = time.monotonic() + arguments.seconds
    prepare(arguments, path)
    recipe = load_recipe(path)
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        **surroundings(),
        "parts": {},
    }
    for part in arguments.parts:
        if time.monotonic() > until:
            break
        _, _, way = part.partition("-")
        loss, alone = loss_of(part), part in PEERS
        found = (
            peer(part, arguments, path, loss, until)
            if alone
            else run_stage(part, path, arguments.work, arguments.steps, until)
        )
        gpus = 2 if way and not alone else 1
        row = {"commit": arguments.commit, **figures(found, recipe, loss, gpus, softmax=alone)}
        result["parts"][part] = row
        result["losses_apart"] = apart(result["parts"])
        arguments.out.write_text(json.dumps(result, indent=1))
        shown = {
            key: row.get(key)
            for key in ("tokens_per_second", "share_of_peak", "peak_mib", "chosen", "step_seconds", "log")
        }
        print(part, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
