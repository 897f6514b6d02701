"""The paper's last stage on a real model, GRPO on MBPP: python -m benchmarks.real.grpo MODEL MBPP.jsonl OUT.json

The reward of an answer is 1 where its program passes the problem's tests, else 0. Greedy answers to test problems are
judged now and then. A converted model and its teacher train alike; answers come by recorded steps. Needs TRL.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.real.programs import Problem, Writer, judged, passing, program, turn
from examples.rl.grpo import HybridGRPOTrainer
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json

TEST, TRAIN = slice(10, 510), slice(600, 974)
"""of MBPP's problems, as its authors part them"""
GROUP = 8
"""answers to a problem that are compared with each other"""
SECONDS = 3
"""that a program may take in training, so that one without an end holds up a step little"""


class TimedGRPOTrainer(HybridGRPOTrainer):
    """Knows how long answers and their rewards took."""

    answering = rewarding = 0.0
    """seconds, of the whole training"""

    def _generate_single_turn(self, *given: Any, **options: Any) -> Any:
        start = time.monotonic()
        found = super()._generate_single_turn(*given, **options)
        self.answering += time.monotonic() - start
        return found

    def _calculate_rewards(self, *given: Any, **options: Any) -> Any:
        start = time.monotonic()
        found = super()._calculate_rewards(*given, **options)
        self.rewarding += time.monotonic() - start
        return found


class TeacherGRPOTrainer(TimedGRPOTrainer):
    """The same without routers: the loss is TRL's."""

    compute_loss = GRPOTrainer.compute_loss


def rewards(problems: dict[str, Problem]) -> Any:
    """The reward function of problems by their id."""

    def earned(completions: list[Any], id: list[str], **_: Any) -> list[float]:
        texts = [program(problems[name], answer[0]["content"]) for name, answer in zip(id, completions, strict=True)]
        return [float(good) for good in passing(texts, SECONDS)]

    return earned


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes the curve after each step."""

    def __init__(self, report: dict[str, Any], options: argparse.Namespace, score: Any) -> None:
        self.report, self.options, self.score, self.start = report, options, score, time.monotonic()
        self.trainer: TimedGRPOTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge the start."""
        self._judge(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """What a step earned, and how long its answers were."""
        if "reward" in logs:
            kept = {"step": state.global_step, "reward": logs["reward"], "tokens": logs.get("completions/mean_length")}
            assert self.trainer is not None
            parts = {"answering": self.trainer.answering, "rewarding": self.trainer.rewarding}
            seconds = {"seconds": time.monotonic() - self.start, **parts}
            self.report["steps"].append({**kept, **{name: round(value, 1) for name, value in seconds.items()}})
            write_json(self.options.out, self.report)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge now and then, and at the end; stop where time is up."""
        control.should_training_stop |= time.monotonic() - self.start > self.options.seconds
        if state.global_step % self.options.every == 0 or control.should_training_stop:
            self._judge(state.global_step)

    def _judge(self, step: int) -> None:
        found = {"step": step, "seconds": round(time.monotonic() - self.start, 1), **self.score()}
        self.report["held_out"].append(found)
        write_json(self.options.out, self.report)
        say(f"step {step}: {found['passed']} of {found['of']}")


def run(options: argparse.Namespace) -> None:
    """Train and write the curve."""
    lines = [json.loads(line) for line in options.problems.read_text(encoding="utf-8").splitlines()]
    train, test = lines[TRAIN], lines[TEST][: options.judged]
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    cuda = model.device.type == "cuda"

    def score() -> dict[str, Any]:
        training = model.training
        with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda):
            found = judged(Writer(model.eval(), tokenizer, batch=options.batch, new=options.tokens), test)
        model.train(training)
        return found

    torch.backends.cuda.enable_cudnn_sdp(False)  # builds a plan for each length of rows, and every step has another
    named = {key: value for key, value in vars(options).items() if key not in ("out", "problems")}
    report = {
        **environment(model.device),
        "options": {k: str(v) for k, v in named.items()},
        "steps": [],
        "held_out": [],
    }
    settings = GRPOConfig(
        output_dir=str(options.out.parent / "grpo"),
        max_steps=options.steps,
        seed=options.seed,
        learning_rate=options.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=GROUP * options.questions // options.micro,
        num_generations=GROUP,
        max_completion_length=options.tokens,
        temperature=1.0,
        beta=0.0,
        bf16=cuda,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    watch = Watch(report, options, score)
    kind = TimedGRPOTrainer if hasattr(model, "sse_balance_loss") else TeacherGRPOTrainer
    trainer = kind(
        model,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": turn(problem), "id": problem["id"]} for problem in train]),
        processing_class=tokenizer,
        reward_funcs=rewards({problem["id"]: problem for problem in train}),
        callbacks=[watch],
    )
    watch.trainer = trainer
    trainer.train()


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="folder")
    p.add_argument("problems", type=Path, help="MBPP as JSON lines")
    p.add_argument("out", type=Path, help="JSON file to write")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seconds", type=float, default=1200, help="after which the last step ends")
    p.add_argument("--questions", type=int, default=16, help="problems of a step")
    p.add_argument("--micro", type=int, default=16, help="answers of a pass")
    p.add_argument("--tokens", type=int, default=256, help="of an answer at most")
    p.add_argument("--rate", type=float, default=1e-6)
    p.add_argument("--every", type=int, default=20, help="steps between judgements")
    p.add_argument("--judged", type=int, default=200, help="test problems")
    p.add_argument("--batch", type=int, default=100, help="answers that are judged at a time")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
