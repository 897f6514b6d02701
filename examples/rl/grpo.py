"""The paper's RL stage in small: GRPO with TRL on a converted model and a task that a program can check.

    sse-convert convert demo/recipe.yaml --set 'layers.pattern=[sse+sliding]' -o out/rl/converted
    sse-convert calibrate demo/recipe.yaml --set 'layers.pattern=[sse+sliding]' -c out/rl/converted -o out/rl/start
    python examples/rl/grpo.py out/rl/start --out out/rl/tuned --curve examples/rl/curve.json

The demo's teacher without any softmax layer reads four sentences with a number each and is asked for one of them. After
conversion alone it names the right one in two of five tries, its teacher nearly always. A reward for digits in their
place, groups of eight answers and some minutes on a CPU bring much of that back, on keys that training never asks for.

Two things are added to TRL's trainer. The loss keeps the balance loss of the routers, which the model adds by itself
only where labels are given. Answers are generated through the cache of states, with CUDA graphs where the device has
them. `curve.png` is drawn beside `curve.json` at the end.
"""

import argparse
import json
import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedModel, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from sse_convert.checkpoints.load_model import load_model, load_tokenizer  # noqa: E402
from sse_convert.data.needle import load_words, make_value, needle_text, question_text  # noqa: E402
from sse_convert.evaluation.intervals import wilson  # noqa: E402
from sse_convert.evaluation.plot import blank_figure  # noqa: E402
from sse_convert.inference.batch import continue_rows  # noqa: E402
from sse_convert.inference.cuda_graphs import graphed  # noqa: E402
from sse_convert.inference.generate import Sampling  # noqa: E402

NEEDLES = 4
DIGITS = 7
GROUP = 8
"""answers to a question that are compared with each other"""
ANSWER_TOKENS = 9
HELD_OUT = 100


def questions(count: int, seed: int, *, held_out: bool = False) -> list[dict[str, str]]:
    """Questions as `{prompt, value}`: numbers hidden in sentences, one of them asked for.

    Args:
        count: how many.
        seed: of the numbers and keys.
        held_out: ask for keys that training never asks for.
    """
    words, rng = load_words(None), random.Random(seed)
    made = []
    for _ in range(count):
        keys = rng.sample(words.held_out if held_out else words.train, NEEDLES)
        values = [make_value(rng, "number", words.train) for _ in keys]
        asked = rng.randrange(NEEDLES)
        told = "".join(needle_text("number", key, value) for key, value in zip(keys, values, strict=True))
        made.append({"prompt": told + question_text("number", keys[asked]), "value": values[asked]})
    return made


def digits_in_place(completions: list[str], value: list[str], **_: Any) -> list[float]:
    """The reward: the share of digits that stand where they should, and one more for the whole number.

    Args:
        completions: what the model wrote.
        value: the right number of each.
        _: what TRL passes besides.
    """
    rewards = []
    for text, right in zip(completions, value, strict=True):
        given = text.strip()[:DIGITS]
        rewards.append(sum(a == b for a, b in zip(given, right, strict=False)) / DIGITS + (given == right))
    return rewards


class HybridGRPOTrainer(GRPOTrainer):
    """TRL's trainer with the balance loss of the routers, and with generation as `sse_convert.inference` does it."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.balance: list[float] = []
        super().__init__(model=model, **options)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """The policy's loss and, as in every other stage, the loss that keeps partitions evenly used."""
        loss = super().compute_loss(model, inputs, *rest, **options)
        balance = self.accelerator.unwrap_model(model).sse_balance_loss()
        self.balance.append(float(balance))
        return loss + balance / self.current_gradient_accumulation_steps

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **options: Any) -> Any:
        """TRL's generation, whose steps are replayed as CUDA graphs where the device has them."""
        slots = max(map(len, prompt_ids)) + self.args.max_completion_length
        with graphed(self.accelerator.unwrap_model(self.model), slots):
            return super()._generate_single_turn(prompt_ids, *rest, **options)


@torch.no_grad()
def held_out_score(model: PreTrainedModel, tokenizer: Any, asked: list[dict[str, str]]) -> dict[str, Any]:
    """Greedy answers to held-out questions: how many are exactly right, with a 95% interval."""
    training = model.training
    model.eval()
    prompts = [tokenizer(question["prompt"])["input_ids"] for question in asked]
    new = continue_rows(model, prompts, Sampling(max_new_tokens=ANSWER_TOKENS))
    model.train(training)
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    correct = sum(text.strip()[:DIGITS] == question["value"] for text, question in zip(texts, asked, strict=True))
    low, high = wilson(correct, len(asked))
    return {"correct": correct, "samples": len(asked), "low": low, "high": high}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes the curve down: rewards of every step, held-out answers now and then."""

    def __init__(self, score: Any, every: int) -> None:
        self.steps: list[dict[str, float]] = []
        self.held_out: list[dict[str, Any]] = []
        self.trainer: HybridGRPOTrainer | None = None
        self._score, self._every = score, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the start."""
        self.held_out.append({"step": 0, **self._score()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Keep what a step earned."""
        if "reward" in logs and self.trainer is not None:
            balance, self.trainer.balance = self.trainer.balance, []
            kept = {"step": state.global_step, "reward": logs["reward"], "balance_loss": sum(balance) / len(balance)}
            self.steps.append(kept)
            print(json.dumps(kept), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure now and then, and at the end."""
        if state.global_step % self._every == 0 or state.global_step == args.max_steps:
            self.held_out.append({"step": state.global_step, **self._score()})
            print(json.dumps(self.held_out[-1]), flush=True)


def train(model: PreTrainedModel, tokenizer: Any, out: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run GRPO; returns the curve.

    Args:
        model: converted, float32; trained in place.
        tokenizer: its tokenizer.
        out: folder of the trainer's files.
        given: `steps`, `questions`, `rate`, `every`, `seed`.
    """
    asked = questions(HELD_OUT, seed=10**6, held_out=True)
    watch = Watch(lambda: held_out_score(model, tokenizer, asked), given.every)
    settings = GRPOConfig(
        output_dir=str(out),
        max_steps=given.steps,
        per_device_train_batch_size=GROUP * given.questions,
        num_generations=GROUP,
        max_completion_length=ANSWER_TOKENS,
        temperature=1.0,
        learning_rate=given.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(5, given.steps),
        beta=0.0,
        seed=given.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = HybridGRPOTrainer(
        model,
        args=settings,
        train_dataset=Dataset.from_list(questions(given.steps * given.questions, seed=given.seed)),
        processing_class=tokenizer,
        reward_funcs=digits_in_place,
        callbacks=[watch],
    )
    watch.trainer = trainer
    start = time.monotonic()
    trainer.train()
    seconds = round(time.monotonic() - start)
    return {"seconds": seconds, "steps": watch.steps, "held_out": watch.held_out}


def draw(curve: dict[str, Any], path: Path) -> None:
    """The curve as a PNG: reward by step, held-out answers with their intervals."""
    figure = blank_figure(8.6, 3.4)
    left, right = figure.subplots(1, 2)
    left.plot([s["step"] for s in curve["steps"]], [s["reward"] for s in curve["steps"]], color="#0072b2")
    left.set(title="training", xlabel="step", ylabel=f"mean reward of {GROUP} answers (0 to 2)", ylim=(0, 2.05))
    x = [score["step"] for score in curve["held_out"]]
    y = [100 * score["correct"] / score["samples"] for score in curve["held_out"]]
    ends = [[100 * score[name] for score in curve["held_out"]] for name in ("low", "high")]
    errors = [[a - b for a, b in zip(y, ends[0], strict=True)], [b - a for a, b in zip(y, ends[1], strict=True)]]
    right.errorbar(x, y, yerr=errors, capsize=3, color="#d55e00", label="hybrid without softmax layers")
    teacher = curve["teacher"]
    right.axhline(100 * teacher["correct"] / teacher["samples"], color="#444444", linestyle=":", label="its teacher")
    right.set(title="held-out keys, greedy", xlabel="step", ylabel="numbers exactly right (%)", ylim=(-3, 103))
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110, format="png")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="converted checkpoint of the demo's teacher")
    parser.add_argument("--out", type=Path, default=Path("out/rl/tuned"), help="folder of the tuned checkpoint")
    parser.add_argument("--curve", type=Path, help="JSON file; the plot goes beside it. Unset: in the folder --out")
    parser.add_argument("--teacher", default=str(ROOT / "demo" / "teacher"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--questions", type=int, default=4, help="questions of a step, each answered eight times")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--every", type=int, default=10, help="steps between held-out scores")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(given.model)
    teacher = load_model(given.teacher, dtype=torch.float32)
    reached = held_out_score(teacher, tokenizer, questions(HELD_OUT, seed=10**6, held_out=True))
    del teacher
    model = load_model(given.model, dtype=torch.float32)
    curve = {
        "command": "python examples/rl/grpo.py " + " ".join(arguments or sys.argv[1:]),
        "machine": f"{model.device.type}, {torch.get_num_threads()} threads",
        **{name: version(name) for name in ("torch", "transformers", "trl")},
        "teacher": reached,
        **train(model, tokenizer, given.out, given),
    }
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    path = given.curve or given.out / "curve.json"
    path.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    draw(curve, path.with_suffix(".png"))
    first, last = curve["held_out"][0]["correct"], curve["held_out"][-1]["correct"]
    print(f"held-out answers exactly right: {first} to {last} of {HELD_OUT}, teacher {reached['correct']}")


if __name__ == "__main__":
    main()
