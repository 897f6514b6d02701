"""Chats made of books, for `loss_mask: assistant`: a passage, and how it goes on; and how well models know the answers.

    python -m benchmarks.quality.answers make out/answers             # chats, and the teacher with a chat template
    python -m benchmarks.quality.answers score benchmarks/quality/answers.yaml CHECKPOINT [--set KEY=VALUE]

The score is that of the assistant's tokens alone, whatever the model was trained on: loss, loss above the teacher's and
KL divergence from the teacher, in nats per token.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from sse_convert.checkpoints.load_model import load_model, load_tokenizer
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.data import RowReader, stack
from sse_convert.data.packing import IGNORED
from sse_convert.recipe import load_recipe
from sse_convert.training.prefetch import with_targets

TEACHER = Path("../shared/checkpoints/teacher-llama-30m")
BOOKS = Path("out/classic-books")
WORDS = 60
"""of a question, and of its answer"""
CHATS = {"train": 4000, "valid": 400}
ROWS = 32
"""that are scored"""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path) -> None:
    """Write `train.jsonl`, `valid.jsonl` and the teacher with a chat template."""
    shutil.copytree(TEACHER, folder / "teacher", dirs_exist_ok=True)
    (folder / "teacher" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    for part, count in CHATS.items():
        lines = [json.dumps({"messages": talk}) for talk in islice(_talks(BOOKS / part), count)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _talks(folder: Path) -> Iterator[list[dict[str, str]]]:
    """One chat of each book, then the next of each."""
    books = [iter(_passages(path)) for path in sorted(folder.glob("*.txt"))]
    while books:
        for book in list(books):
            asked, answer = next(book, ""), next(book, "")
            if not answer:
                books.remove(book)
                continue
            yield [{"role": "user", "content": f"Go on: {asked}"}, {"role": "assistant", "content": answer}]


def _passages(path: Path) -> list[str]:
    words = path.read_text(encoding="utf-8").split()
    return [" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS, WORDS)]


@torch.no_grad()
def score(recipe_file: str, overrides: list[str], checkpoint: Path) -> dict[str, float]:
    """Loss, gap to the teacher and KL from it on the assistant's tokens of the recipe's held-out chats."""
    recipe = load_recipe(recipe_file, overrides)
    teacher, student = load_model(recipe.model), load_model(checkpoint)
    length = recipe.stages[0].seq_len
    tokenizer = load_tokenizer(checkpoint)
    reader = RowReader(recipe.data.valid, tokenizer, length, recipe.data.seed, role="valid", loss_mask="assistant")
    sums = dict.fromkeys(("loss", "teacher", "kl", "tokens"), 0.0)
    for row in islice(reader.rows(), ROWS):
        batch = with_targets(stack([row]))
        kept = batch["targets"] != IGNORED
        inputs = {name: batch[name].to(student.device) for name in ("input_ids", "position_ids")}
        own, theirs = (
            model(**inputs, use_cache=False).logits.cpu()[kept].double().log_softmax(-1) for model in (student, teacher)
        )
        index = batch["targets"][kept][:, None]
        sums["loss"] -= float(own.gather(1, index).sum())
        sums["teacher"] -= float(theirs.gather(1, index).sum())
        sums["kl"] += float((theirs.exp() * (theirs - own)).sum())
        sums["tokens"] += len(index)
    means = {name: sums[name] / sums["tokens"] for name in ("loss", "teacher", "kl")}
    return {**means, "gap": means["loss"] - means["teacher"], "tokens": sums["tokens"]}


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("folder", type=Path)
    scoring = commands.add_parser("score")
    scoring.add_argument("recipe")
    scoring.add_argument("checkpoint", type=Path)
    scoring.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    options = p.parse_args(arguments)
    hush_libraries()
    if options.command == "make":
        make(options.folder)
        return
    print(json.dumps(score(options.recipe, options.set, options.checkpoint)))


if __name__ == "__main__":
    sys.exit(main())
