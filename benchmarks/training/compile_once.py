"""What a run compiles and when: two stages on SmolLM2's true shape, then again with what the first run compiled.

    python benchmarks/training/compile_once.py --out out/compile_once.json

Weights are random, and text has documents of all lengths from a seed. `sse-convert run` makes everything but a choice
of layers; the second run finds the first one's folder without its training stages. The JSON has each step's seconds
with the compiling in it, why programs were compiled again, and where the time before the first step went, by samples
of the main thread. `--tiny` tries the script on a CPU.
"""

import argparse
import json
import logging
import os
import random
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml
from fsdp_smoke import TINY_ROW, TINY_STEP, make_teacher, make_text, surroundings, unwind_when_terminated
from torch._dynamo.utils import counters, cumulative_time_spent_ns
from torch.optim.optimizer import register_optimizer_step_post_hook

from sse_convert.recipe import load_recipe
from sse_convert.training.metrics import read

RECIPE, CONFIG = "smollm2-135m", Path("tests/fixtures/configs/smollm2-135m.json")
KEPT = (0, 7, 8, 14, 15, 18, 21, 23)
"""softmax layers that `select` chose for the real weights"""
PHASES = {"convert_checkpoint": "convert", "calibrate_checkpoint": "calibrate", "run_stage": "train"}
SAMPLE_SECONDS, TOP = 0.02, 40
STACK = 60
"""most frames of a sample"""


class Watch:
    """Notes what each optimizer step compiled, and where the main thread is.

    Args:
        out: JSON to write when the process ends.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._began = out, time.monotonic()
        self._triton: list[tuple[str, bool, float]] = []
        self._reasons: list[str] = []
        self._phases: dict[str, Counter[str]] = {}
        self._processor: Counter[str] = Counter()
        self._main = threading.main_thread().ident
        self.steps: list[dict[str, Any]] = []
        register_optimizer_step_post_hook(self._step)
        self._listen()
        threading.Thread(target=self._sample, daemon=True).start()

    def _listen(self) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: self._reasons.append(record.getMessage())  # type: ignore[method-assign]
        torch._logging.set_logs(recompiles=True, graph_breaks=True)
        for name in ("recompiles", "graph_breaks"):
            for logger in (n for n in logging.root.manager.loggerDict if n.endswith(f"__{name}")):
                logging.getLogger(logger).addHandler(handler)
        try:
            from triton import knobs
        except ImportError:
            return

        def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            self._triton.append((str(getattr(src, "name", src)), cache_hit, times.total / 1e6))

        knobs.compilation.listener = compiled

    def _step(self, *_: Any) -> None:
        kernels, self._triton = self._triton, []
        reasons, self._reasons = self._reasons, []
        self.steps.append(
            {
                "at": time.monotonic() - self._began,
                "graphs": counters["stats"]["unique_graphs"],
                "compile_seconds": cumulative_time_spent_ns["entire_frame_compile"] / 1e9,
                "backward_compile_seconds": cumulative_time_spent_ns["entire_backward_compile"] / 1e9,
                "inductor_hits": counters["inductor"]["fxgraph_cache_hit"],
                "inductor_misses": counters["inductor"]["fxgraph_cache_miss"],
                "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
                "autograd_misses": counters["aot_autograd"]["autograd_cache_miss"],
                "autograd_bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
                "kernels": dict(Counter(name for name, hit, _ in kernels if not hit)),
                "kernel_seconds": sum(seconds for _, hit, seconds in kernels if not hit),
                "kernel_hits": sum(hit for _, hit, _ in kernels),
                "reasons": reasons,
            }
        )

    def _sample(self) -> None:
        spent = time.process_time()
        while True:
            time.sleep(SAMPLE_SECONDS)
            names, frame = [], sys._current_frames().get(self._main or 0)
            while frame is not None and len(names) < STACK:
                code = frame.f_code
                names.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}")
                frame = frame.f_back
            short = {name.rsplit(":", 1)[1] for name in names}
            phase = next((phase for name, phase in PHASES.items() if name in short), "else")
            if phase == "train" and self.steps:
                phase = "steps"
            now = time.process_time()
            self._processor[phase] += now - spent
            spent = now
            seen = self._phases.setdefault(phase, Counter())
            seen.update(set(names))
            seen["samples"] += 1

    def write(self) -> None:
        """The JSON."""
        phases = {
            phase: {
                "seconds": seen.pop("samples") * SAMPLE_SECONDS,
                "processor_seconds": self._processor[phase],
                "inclusive_seconds": {name: n * SAMPLE_SECONDS for name, n in seen.most_common(TOP)},
            }
            for phase, seen in list(self._phases.items())
        }
        self._out.write_text(json.dumps({"steps": self.steps, "after": self._reasons, "phases": phases}))


def watched(recipe: Path, out: Path) -> None:
    """`sse-convert run` in this process."""
    watch = Watch(out)
    sys.argv = ["sse_convert", "run", str(recipe)]
    try:
        runpy.run_module("sse_convert", run_name="__main__")
    finally:
        watch.write()


def make_documents(folder: Path, count: int) -> None:
    """Cut the random text into documents of lognormal lengths, from a line to more than a row."""
    chance = random.Random(1)
    words = " ".join(path.read_text() for path in sorted(folder.glob("*.txt"))).split()
    for path in folder.glob("*.txt"):
        path.unlink()
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(count):
            length = int(min(chance.lognormvariate(5.5, 1.5), 20_000)) + 3
            begin = chance.randrange(max(1, len(words) - length))
            file.write(json.dumps({"text": " ".join(words[begin : begin + length])}) + "\n")


def make_recipe(work: Path, steps: int, *, tiny: bool) -> Path:
    """Write the recipe with this model and text, the layers of `KEPT`, and stages of so many steps."""
    raw = yaml.safe_load(Path(f"recipes/{RECIPE}.yaml").read_text())
    packaged = load_recipe(RECIPE)
    layers = 5 if tiny else json.loads(CONFIG.read_text())["num_hidden_layers"]
    raw["layers"] = {"pattern": ["full" if i in KEPT else "sse+sliding" for i in range(layers)]}
    for stage, read_stage in zip(raw["stages"], packaged.stages, strict=True):
        if tiny:
            stage |= {"seq_len": TINY_ROW, "batch_tokens": TINY_STEP}
        stage["tokens"] = steps * (TINY_STEP if tiny else read_stage.batch_tokens)
    raw["train"] = {"compile": True, "validate_every": 10 * (TINY_STEP if tiny else packaged.stages[0].batch_tokens)}
    raw |= {"model": str(work / "teacher"), "eval": {}}
    text = {"path": str(work / "text" / "text.jsonl")}
    raw["data"] = {"train": [text], "valid": [text]}
    raw["export"] = {"dir": str(work / "exported")}
    if tiny:
        raw["calibrate"] = {"rows": 2, "seq_len": 2 * TINY_ROW}
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def forget_stages(work: Path) -> None:
    """Leave of a run what comes before training, and what lies beside its steps."""
    shutil.rmtree(work / "exported", ignore_errors=True)
    for path in (work / "exported.stages").glob("[0-9][0-9]-*"):
        if path.name[3:].split(".")[0] not in ("convert", "calibrate"):
            shutil.rmtree(path)


def run(name: str, recipe: Path, work: Path, seconds: float) -> dict[str, Any]:
    """One run, and what it compiled in each step."""
    seen, log, began = work / f"{name}.json", work / f"{name}.log", time.monotonic()
    command = [sys.executable, __file__, "--out", str(seen), "--watched", str(recipe)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    found = json.loads(seen.read_text()) if seen.is_file() else {"steps": [], "phases": {}}
    stages = {}
    for stage in load_recipe(recipe).stages:
        for path in (work / "exported.stages").glob(f"*-{stage.name}*/metrics.jsonl"):
            records = read(path)
            stages[stage.name] = [(record["seconds"], record["loss"]) for record in records]
            place = path.with_name("chosen.json"), path.parent.with_name(f"{path.parent.name}.work") / "chosen.json"
            found[f"chosen {stage.name}"] = [json.loads(p.read_text()) for p in place if p.is_file()]
    return {
        "code": code,
        "seconds": time.monotonic() - began,
        "stages": {stage: summary(steps) for stage, steps in stages.items()},
        "log": [line for line in log.read_text().splitlines() if "[__recompiles]" not in line][-40:],
        **found,
    }


def summary(steps: list[tuple[float, float]]) -> dict[str, Any]:
    """Seconds and losses of a stage's steps, and the seconds that its first steps and slow ones took beyond the
    median."""
    seconds = [spent for spent, _ in steps]
    usual = statistics.median(seconds)
    return {
        "seconds": [round(spent, 3) for spent in seconds],
        "losses": [loss for _, loss in steps],
        "median": usual,
        "first_three_beyond": sum(seconds[:3]) - 3 * usual,
        "slow": {i + 1: round(spent, 2) for i, spent in enumerate(seconds) if i > 2 and spent > 1.5 * usual},
    }


def show(name: str, found: dict[str, Any]) -> None:
    """The run for a person."""
    print(f"\n== {name}: code {found['code']}, {found['seconds']:.0f} s")
    for stage, one in found["stages"].items():
        first = one["first_three_beyond"]
        print(f"{stage}: median {one['median']:.3f} s, first three {first:.1f} s beyond it, slow {one['slow']}")
        print("  ", one["seconds"])
        print("  losses", [round(loss, 6) for loss in one["losses"]])
    for phase, spent in found["phases"].items():
        print(f"{phase}: {spent['seconds']:.1f} s, processor {spent['processor_seconds']:.1f} s")
        if phase in ("calibrate", "train"):
            for function, seconds in list(spent["inclusive_seconds"].items())[:TOP]:
                print(f"     {seconds:6.1f} {function}")
    before: dict[str, Any] = {}
    for i, step in enumerate(found["steps"]):
        changed = {key: value for key, value in step.items() if value and value != before.get(key) and key != "at"}
        if changed:
            print(
                f"optimizer step {i + 1} at {step['at']:.1f} s:", {k: v for k, v in changed.items() if k != "reasons"}
            )
            for reason in step["reasons"]:
                print("    ", "\n      ".join(reason.splitlines()[:12]))
        before = step
    print("\n".join(found["log"]))


def main() -> None:
    """Prepare, run, run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--work", type=Path, default=Path("/tmp/compile_once"), help="folder to make")
    parser.add_argument("--steps", type=int, default=30, help="of each stage")
    parser.add_argument("--commit", default="", help="to record")
    parser.add_argument("--seconds", type=float, default=280, help="for each run")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unwind_when_terminated()
    if arguments.watched:
        watched(arguments.watched, arguments.out)
        return
    work: Path = arguments.work
    tokenizer = make_text(work / "text", 4 if arguments.tiny else 20)
    make_documents(work / "text", 400 if arguments.tiny else 6_000)
    make_teacher(CONFIG, work / "teacher", tokenizer, tiny=arguments.tiny)
    recipe = make_recipe(work, arguments.steps, tiny=arguments.tiny)
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "commit": arguments.commit}
    result |= {**surroundings(), "cores": os.cpu_count(), "runs": {}}
    for name in ("fresh", "again"):
        result["runs"][name] = run(name, recipe, work, arguments.seconds)
        show(name, result["runs"][name])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1))
        forget_stages(work)


if __name__ == "__main__":
    main()
