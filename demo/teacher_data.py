"""Training data of the demo teacher: a small tokenizer, tokenised public-domain books, and rows with planted needles.

    python demo/teacher_data.py --books BOOKS --data DATA

BOOKS holds `train/*.txt` and `valid/*.txt`, one UTF-8 file per book. DATA receives `tokenizer.json`, `train.u16.xz`
and `valid.u16` (token ids, little-endian uint16, books divided by <|endoftext|>), `data.json` (counts).
"""

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sse_convert.data import needle

EOS = "<|endoftext|>"
PAD = "<|pad|>"
COUNTS = (1, 2, 4, 8, 8, 16, 16, 24)  # needles in a row, drawn uniformly
KINDS: tuple[needle.Kind, ...] = ("number", "number", "word", "code")
TOKENS_PER_NEEDLE = 72  # a needle, its question and its answer, roughly; bounds how many fit a row


def train_tokenizer(files: list[Path], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that keeps every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer


def prepare(books: Path, data: Path, vocab_size: int) -> None:
    """Train the tokenizer on every fourth training book and tokenise all books into `data`."""
    data.mkdir(parents=True, exist_ok=True)
    train_files = sorted((books / "train").glob("*.txt"))
    tokenizer = train_tokenizer(train_files[::4], vocab_size)
    tokenizer.save(str(data / "tokenizer.json"), pretty=False)
    counts: dict[str, int] = {"vocab_size": vocab_size}
    for split in ("train", "valid"):
        ids: list[NDArray[np.uint16]] = []
        size = 0
        for file in sorted((books / split).glob("*.txt")):
            text = file.read_text(encoding="utf-8")
            size += len(text.encode())
            ids.append(np.array([0, *tokenizer.encode(text).ids], dtype="<u2"))
        tokens = np.concatenate(ids)
        counts |= {f"{split}_books": len(ids), f"{split}_tokens": len(tokens), f"{split}_bytes": size}
        if split == "train":
            (data / "train.u16.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=6))
        else:
            (data / "valid.u16").write_bytes(tokens.tobytes())
    (data / "data.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(counts)


def load(data: Path) -> tuple[Tokenizer, NDArray[np.uint16], NDArray[np.uint16]]:
    """Tokenizer, training tokens and held-out tokens of a prepared folder."""
    train = np.frombuffer(lzma.decompress((data / "train.u16.xz").read_bytes()), dtype="<u2")
    return Tokenizer.from_file(str(data / "tokenizer.json")), train, np.fromfile(data / "valid.u16", dtype="<u2")


class Rows:
    """Draws training rows of exactly T tokens: book text, or book text with needles and questions.

    A row starts with <|endoftext|> and the first token of a paragraph in half of the plain rows (so that the model can
    be sampled from nothing) and in one in twenty of the needle rows; all other rows start anywhere in a book.
    """

    def __init__(self, tokens: NDArray[np.uint16], tokenizer: Tokenizer, seed: int) -> None:
        self.tokens, self.tokenizer, self.rng = tokens, tokenizer, random.Random(seed)
        self.words = needle.load_words().train
        line_end = tokens == self._encode("\n")[0]
        self.paragraphs = np.flatnonzero(line_end[:-1] & line_end[1:]) + 2

    def row(self, length: int, needle_share: float) -> list[int]:
        """One training row."""
        if self.rng.random() < needle_share:
            return self.needles(length)
        return self.text(length, bos=self.rng.random() < 0.5)

    def text(self, length: int, bos: bool) -> list[int]:
        """`length` tokens of book text."""
        limit = len(self.tokens) - length
        if not bos:
            start = self.rng.randrange(limit)
            return [int(token) for token in self.tokens[start : start + length]]
        start = min(int(self.paragraphs[self.rng.randrange(len(self.paragraphs))]), limit)
        return [0, *(int(token) for token in self.tokens[start : start + length - 1])]

    def needles(self, length: int) -> list[int]:
        """`length` tokens with needles at random depths; half of the questions come in the text, half at the end."""
        rng = self.rng
        count = min(rng.choice(COUNTS), max(1, length // TOKENS_PER_NEEDLE))
        kinds = [rng.choice(KINDS)] * count if rng.random() < 0.75 else [rng.choice(KINDS) for _ in range(count)]
        line_break = rng.random() < 0.25
        planted, asked = [], []
        for key, kind in zip(rng.sample(self.words, count), kinds, strict=True):
            value = needle.make_value(rng, kind, self.words)
            sentence = needle.needle_text(kind, key, value)
            planted.append(self._encode("\n" + sentence[1:] if line_break else sentence))
            asked.append(self._encode(f"{needle.question_text(kind, key)} {value}."))
        room = length - sum(map(len, planted)) - sum(map(len, asked))
        while room < length // 8:
            room += len(asked.pop())
        depths = [rng.randrange(1, room + 1) for _ in planted]
        events = [(depth, rng.random(), ids) for depth, ids in zip(depths, planted, strict=True)]
        for depth, ids in zip(depths, asked, strict=False):
            later = rng.randrange(depth, room + 1) if rng.random() < 0.5 else room
            events.append((later, 1 + rng.random(), ids))
        return self._splice(self.text(room, bos=rng.random() < 0.05), events)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    @staticmethod
    def _splice(hay: list[int], events: list[tuple[int, float, list[int]]]) -> list[int]:
        row: list[int] = []
        done = 0
        for depth, _, ids in sorted(events):
            row += hay[done:depth] + ids
            done = depth
        return row + hay[done:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True, help="folder with train/*.txt and valid/*.txt")
    parser.add_argument("--data", type=Path, required=True, help="folder to write")
    parser.add_argument("--vocab", type=int, default=2048, help="tokenizer entries")
    args = parser.parse_args()
    prepare(args.books, args.data, args.vocab)
