"""The paper's RL stage in small: GRPO with TRL on a converted model and a task that a program can check.

    sse-convert convert demo/recipe.yaml -o out/rl/converted
    sse-convert calibrate demo/recipe.yaml --set calibrate.rows=4 -c out/rl/converted -o out/rl/start
    python examples/rl/grpo.py out/rl/start --curve examples/rl/curve.json

The demo's teacher writes seven digits behind "One of the special magic numbers for acorn is:". The task is to write
them in rising order. A program checks that: the reward is the share of neighbours that rise, and one more for a number
that rises throughout. Scores are of keys that training never shows.

Two things are added to TRL's trainer. The loss keeps the balance loss of the routers, which the model adds by itself
only where labels are given. Answers are generated through the cache of states, with CUDA graphs where the device has
them; `--tokens` makes them as long as a task needs. `curve.png` is drawn beside `curve.json` at the end.
"""

import argparse
import itertools
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
from sse_convert.data.needle import load_words  # noqa: E402
from sse_convert.evaluation.intervals import wilson  # noqa: E402
from sse_convert.inference.cuda_graphs import graphed  # noqa: E402

DIGITS = 7
GROUP = 8
"""answers to a question that are compared with each other"""
HELD_OUT = 200


def questions(count: int, seed: int, *, held_out: bool = False) -> list[dict[str, str]]:
    """Prompts after which the model writes a number, as `{prompt}`.

    Args:
        count: how many.
        seed: of the keys.
        held_out: with keys that training never shows.
    """
    words, rng = load_words(None), random.Random(seed)
    keys = words.held_out if held_out else words.train
    return [{"prompt": f"One of the special magic numbers for {rng.choice(keys)} is:"} for _ in range(count)]


def rising(text: str) -> float:
    """Share of the neighbours among a text's first digits that rise; 0 for a text that is no number."""
    digits = text.strip()[:DIGITS]
    if len(digits) < DIGITS or not (digits.isascii() and digits.isdigit()):
        return 0.0
    return sum(a < b for a, b in itertools.pairwise(digits)) / (DIGITS - 1)


def reward(completions: list[str], **_: Any) -> list[float]:
    """The reward of each completion: its share, and one more where all rise. TRL passes more than it needs."""
    return [share + (share == 1) for share in map(rising, completions)]


class HybridGRPOTrainer(GRPOTrainer):
    """TRL's trainer with the balance loss of the routers, and with generation as `sse_convert.inference` does it."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.balance: list[float] = []
        super().__init__(model=model, **options)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """The policy's loss and, as in every other stage, the loss that keeps partitions evenly used."""
        loss = super().compute_loss(model, inputs, *rest, **options)
        balance = self.accelerator.unwrap_model(model).sse_balance_loss()
        self.balance.append(float(balance.detach()))
        return loss + balance / self.current_gradient_accumulation_steps

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **options: Any) -> Any:
        """TRL's generation, whose steps are replayed as CUDA graphs where the device has them."""
        slots = max(map(len, prompt_ids)) + self.args.max_completion_length
        with graphed(self.accelerator.unwrap_model(self.model), slots):
            return super()._generate_single_turn(prompt_ids, *rest, **options)


@torch.no_grad()
def held_out_score(model: PreTrainedModel, tokenizer: Any, tokens: int) -> dict[str, Any]:
    """One answer at temperature 1 to each held-out prompt: how much of them rises, with a 95% interval.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        tokens: of an answer at most.
    """
    training = model.training
    model.eval()
    asked = questions(HELD_OUT, seed=10**6, held_out=True)
    prompts = [question["prompt"] for question in asked]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    width = batch["input_ids"].shape[1]
    with torch.random.fork_rng(), graphed(model, slots=width + tokens):
        torch.manual_seed(0)
        new = model.generate(**batch, max_new_tokens=tokens, do_sample=True, top_k=0)[:, width:]
    model.train(training)
    shares = [rising(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    low, high = wilson(sum(shares), HELD_OUT)
    mean, whole = sum(shares) / HELD_OUT, sum(share == 1 for share in shares)
    return {"rising": mean, "low": low, "high": high, "rising_throughout": whole, "samples": HELD_OUT}


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
            kept = {
                "step": state.global_step,
                "reward": logs["reward"],
                "loss": logs["loss"],
                "balance_loss": sum(balance) / len(balance),
            }
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
        given: `steps`, `questions`, `tokens`, `rate`, `every`, `seed`.
    """
    watch = Watch(lambda: held_out_score(model, tokenizer, given.tokens), given.every)
    settings = GRPOConfig(
        output_dir=str(out),
        max_steps=given.steps,
        per_device_train_batch_size=GROUP * given.questions,
        num_generations=GROUP,
        max_completion_length=given.tokens,
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
        reward_funcs=reward,
        callbacks=[watch],
    )
    watch.trainer = trainer
    start = time.monotonic()
    trainer.train()
    seconds = round(time.monotonic() - start)
    return {"seconds": seconds, "steps": watch.steps, "held_out": watch.held_out}


def draw(curve: dict[str, Any], path: Path) -> None:
    """The curve as a PNG: reward by step, held-out answers with their intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([s["step"] for s in curve["steps"]], [s["reward"] for s in curve["steps"]], color="#0072b2")
    left.set(title="training", xlabel="step", ylabel=f"mean reward of {GROUP} answers (0 to 2)", ylim=(0, 2.05))
    x = [score["step"] for score in curve["held_out"]]
    y = [100 * score["rising"] for score in curve["held_out"]]
    ends = [[100 * score[name] for score in curve["held_out"]] for name in ("low", "high")]
    errors = [[a - b for a, b in zip(y, ends[0], strict=True)], [b - a for a, b in zip(y, ends[1], strict=True)]]
    right.errorbar(x, y, yerr=errors, capsize=3, color="#d55e00")
    right.set(title="held-out keys, one answer each", xlabel="step", ylabel="neighbours that rise (%)", ylim=(-3, 103))
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110, format="png")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="converted checkpoint of the demo's teacher")
    parser.add_argument("--out", type=Path, default=Path("out/rl/tuned"), help="folder of the tuned checkpoint")
    parser.add_argument("--curve", type=Path, help="JSON file; the plot goes beside it. Unset: in the folder --out")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--questions", type=int, default=4, help="questions of a step, each answered eight times")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer at most")
    parser.add_argument("--rate", type=float, default=4e-4, help="learning rate")
    parser.add_argument("--every", type=int, default=10, help="steps between held-out scores")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(given.model)
    model = load_model(given.model, dtype=torch.float32)
    curve = {
        "command": "python examples/rl/grpo.py " + " ".join(arguments or sys.argv[1:]),
        "machine": f"{model.device.type}, {torch.get_num_threads()} threads",
        **{name: version(name) for name in ("torch", "transformers", "trl")},
        **train(model, tokenizer, given.out, given),
    }
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    path = given.curve or given.out / "curve.json"
    path.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    draw(curve, path.with_suffix(".png"))
    first, last = curve["held_out"][0], curve["held_out"][-1]
    print(f"neighbours that rise in held-out answers: {first['rising']:.0%} before, {last['rising']:.0%} after")


if __name__ == "__main__":
    main()
