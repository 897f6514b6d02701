"""Needles and KL of one model by teacher forcing. A needle counts where every digit of its answer is the likeliest.

The space before a number is given where it is a token of its own: whether a model writes `is 12` or `is: 12` says
nothing of what it remembers.
"""

import dataclasses as dc
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sse_convert.data.needle import load_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TASKS = {"noise": 1, "book": 1, "one of four": 4}
"""kind of text -> needles in a row"""
TOKENS = 16384
"""of a forward pass at most, if rows are not longer"""


@dc.dataclass(frozen=True, slots=True)
class Wording:
    """How facts are planted and asked for."""

    head: str
    fact: str
    question: str


RULER = Wording(
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
    "about the numbers afterwards.\n",
    " One of the special magic numbers for {key} is: {value}.",
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is",
)


@dc.dataclass(frozen=True, slots=True)
class Row:
    """A row with facts, one of which is asked for at its end."""

    ids: list[int]
    answer: int
    """tokens of the number, the last ones"""
    fact: range
    """where the asked fact stands"""


class Judge:
    """A model with rows to ask it and text to compare it on.

    Args:
        folder: of the model, or its hub id.
        books: folder of text files, every other one of which judges; the rest is for choices.
        device: such as cuda.
        seed: of rows and passages.
    """

    def __init__(self, folder: str, books: Path, device: str, seed: int = 0) -> None:
        self.device, self.seed, self.words = device, seed, load_words().held_out
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        texts = [self.ids(path.read_text(encoding="utf-8")[:600_000]) for path in sorted(books.glob("*.txt"))]
        self.judging, self.choosing = texts[::2], texts[1::2]

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def row(self, task: str, length: int, rng: random.Random, wording: Wording, texts: Sequence[list[int]]) -> Row:
        """One row of exactly `length` tokens."""
        keys = rng.sample(self.words, TASKS[task])
        values = [str(rng.randint(10**6, 10**7 - 1)) for _ in keys]
        facts = [self.ids(wording.fact.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
        asked = rng.randrange(len(keys))
        head, answer = self.ids(wording.head), self.ids(" " + values[asked])
        tail = self.ids(wording.question.format(key=keys[asked]))
        room = length - len(head) - len(tail) - len(answer) - sum(map(len, facts))
        body = self._body(task, room, rng, texts)
        out, last, at = list(head), 0, 0
        for i, (cut, fact) in enumerate(zip(sorted(rng.randrange(room) for _ in facts), facts, strict=True)):
            out += body[last:cut]
            at, last = (len(out) if i == asked else at), cut
            out += fact
        space = answer[:1] == self.ids(" ")
        return Row([*out, *body[last:], *tail, *answer], len(answer) - space, range(at, at + len(facts[asked])))

    def _body(self, task: str, room: int, rng: random.Random, texts: Sequence[list[int]]) -> list[int]:
        if task == "noise":
            noise = self.ids(NOISE)
            return (noise * (room // len(noise) + 1))[:room]
        text = rng.choice([text for text in texts if len(text) > room + 1])
        start = rng.randrange(len(text) - room)
        return text[start : start + room]

    def rows(self, task: str, length: int, count: int) -> list[Row]:
        """The rows that judge, in RULER's wording."""
        rng = random.Random(f"{self.seed} {task} {length}")
        return [self.row(task, length, rng, RULER, self.judging) for _ in range(count)]

    def passages(self, texts: Sequence[list[int]], length: int, count: int) -> Tensor:
        """int64 [count, length] of running text."""
        rng = random.Random(f"{self.seed} text {length}")
        long = [text for text in texts if len(text) > length + 1]
        starts = [(text := rng.choice(long), rng.randrange(len(text) - length)) for _ in range(count)]
        return torch.tensor([text[at : at + length] for text, at in starts], device=self.device)

    def logs(self, ids: Tensor, last: int = 0) -> Tensor:
        """Log probabilities [B, T, V], or of the last tokens alone."""
        made: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=last).logits
        return made.float().log_softmax(-1)

    def answers(self, rows: Sequence[Row]) -> tuple[int, float]:
        """How many answers are wholly right, and the mean loss of their tokens in nats."""
        right, loss = 0, 0.0
        for part in _parts(rows):
            ids = torch.tensor([row.ids for row in part], device=self.device)
            found = self.logs(ids, max(row.answer for row in part) + 1)[:, :-1]
            for logs, row in zip(found, part, strict=True):
                target, own = torch.tensor(row.ids[-row.answer :], device=self.device), logs[-row.answer :]
                right += bool((own.argmax(-1) == target).all())
                loss -= float(own.gather(-1, target[:, None]).mean())
        return right, loss / len(rows)

    def needles(self, lengths: Sequence[int], samples: int) -> dict[str, dict[str, float]]:
        """`task length` -> answers that are right, of how many, and the mean loss of their tokens."""
        asked = [(task, length) for task in TASKS for length in lengths]
        found = {key: self.answers(self.rows(*key, samples)) for key in asked}
        return {
            f"{task} {length}": {"right": right, "of": samples, "loss": round(loss, 3)}
            for (task, length), (right, loss) in found.items()
        }

    def kl(self, ids: Tensor, expected: Sequence[Tensor]) -> float:
        """Mean KL from expected log probabilities, [T, V] of each row, in nats per token."""
        total, size = 0.0, max(1, TOKENS // 2 // ids.shape[1])
        for i in range(0, len(ids), size):
            for logs, own in zip(expected[i : i + size], self.logs(ids[i : i + size]), strict=True):
                for p, q in zip(logs.split(TOKENS // 4), own.split(TOKENS // 4), strict=True):
                    total += float((p.exp() * (p - q)).sum())
        return total / ids.numel()

    def expected(self, ids: Tensor) -> list[Tensor]:
        """Log probabilities [T, V] of each row."""
        return [self.logs(row[None])[0] for row in ids]


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    size = max(1, TOKENS // len(rows[0].ids))
    for i in range(0, len(rows), size):
        yield rows[i : i + size]
