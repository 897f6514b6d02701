"""Rows whose answer stands far back, in several forms: a teacher need not know any one wording to be judged by recall.

R rows, T tokens per row. Of every row one answer is scored, its last tokens.
"""

import contextlib
import dataclasses as dc
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sse_convert.data.documents import beginning_ids
from sse_convert.data.needle import KeyWords, splice, text_stretch
from sse_convert.data.recall_rows import recall_row
from sse_convert.data.tokens import token_ids
from sse_convert.errors import DataError
from sse_convert.evaluation.retrieval import needle_samples
from sse_convert.recipe.schema import NeedleEval, Needles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = 4
"""facts in a row, one of which is asked for"""
PASSAGE = 32
"""tokens that a copy row repeats"""
NEEDLE = " One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    "\nWhat is the special magic number for {query} mentioned in the provided text?"
    " The special magic number for {query} mentioned in the provided text is:",
)
"""RULER's wording (arXiv:2404.06654): before the text, and after it"""
NAMES = {
    "needle": "needles",
    "ruler": "needles in RULER's wording",
    "table": "rows of tables",
    "numbered": "numbered statements",
    "facts": "facts in many wordings",
    "copy": "copies of random tokens",
}
"""what is asked, in the order in which it is tried"""


@dc.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens, and which predictions in them count."""

    ids: Tensor
    """int64 [R, T]"""
    asked: Tensor
    """bool [R, T - 1], True where the next token is scored"""


@dc.dataclass(frozen=True, slots=True)
class RecallMaterial:
    """What rows are made of."""

    haystack: list[int]
    """running text"""
    tokenizer: "PreTrainedTokenizerBase"
    """the model's"""
    words: KeyWords
    """key words"""
    samples: int
    """R"""
    length: int
    """T"""
    seed: int
    """equal seeds give equal rows"""

    def rng(self, kind: str) -> random.Random:
        """Randomness of one kind of rows."""
        return random.Random(f"{self.seed} {kind}")


def recall_rows(material: RecallMaterial) -> dict[str, Rows]:
    """Rows of every kind of `NAMES` that fits into the length; needles must.

    Raises:
        DataError: the text is too short or of one token only, or needles do not fit into a row.
    """
    rows = {"needle": needle_rows(material)}
    for kind in NAMES:
        if kind not in ("needle", "copy"):
            with contextlib.suppress(DataError):  # rows of the shortest allowed length do not hold every form
                rows[kind] = ruler_rows(material) if kind == "ruler" else form_rows(material, kind)
    return {**rows, "copy": copy_rows(material.rng("copy"), material.haystack, material.samples, material.length)}


def needle_rows(material: RecallMaterial) -> Rows:
    """The rows of the needle evaluation, with numbers."""
    settings = NeedleEval(lengths=[material.length], samples=material.samples, keys=[KEYS])
    (found,) = needle_samples(settings, material.haystack, material.tokenizer, material.words, material.seed)
    return _rows([(list(sample.token_ids), sample.answer_len) for sample in found])


def ruler_rows(material: RecallMaterial) -> Rows:
    """Four numbers in the wording of RULER, keys of two words; the answer follows a colon."""
    rng, found = material.rng("ruler"), []
    head, tail = QUESTION
    for _ in range(material.samples):
        keys = ["-".join(rng.sample(material.words.held_out, 2)) for _ in range(KEYS)]
        values = [str(rng.randrange(10**6, 10**7)) for _ in keys]
        facts = [NEEDLE.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
        texts = [head, tail.format(query=keys[0]), f" {values[0]}", *facts]
        start, asked, answer, *planted = token_ids(material.tokenizer, texts)
        start = beginning_ids(material.tokenizer) + start
        size = material.length - sum(map(len, (start, asked, answer, *planted)))
        hay = text_stretch(rng, material.haystack, size, material.length)
        cuts = [rng.randint(0, size) for _ in planted]
        found.append((start + splice(hay, planted, cuts) + asked + answer, len(answer)))
    return _rows(found)


def form_rows(material: RecallMaterial, form: str) -> Rows:
    """Training rows of one form, with numbers."""
    rng, needles, found = material.rng(form), Needles(forms={form: 1.0}, keys=[KEYS], kinds=["number"]), []
    for _ in range(material.samples):
        row = recall_row(rng, material.haystack, material.length, needles, material.tokenizer, material.words)
        found.append((row.token_ids, row.answers[::-1].index(False)))
    return _rows(found)


def copy_rows(rng: random.Random, haystack: list[int], samples: int, length: int) -> Rows:
    """Rows in which a passage of random tokens stands in the first half of some text and again at its end.

    Needs no skill but looking back: any model with an induction head does it.

    Args:
        rng: source of randomness; equal states give equal rows.
        haystack: running text, at least `length` tokens; the passage's tokens are drawn from it, each at most once.
        samples: R.
        length: T, at least four passages.

    Raises:
        DataError: the text has fewer than two different tokens.
    """
    vocabulary = sorted(set(haystack))
    if len(vocabulary) < 2:
        raise DataError("all tokens of the text are the same", expected="running text", fix="give another text")
    size = min(PASSAGE, length // 4, len(vocabulary))
    found = []
    for _ in range(samples):
        passage = rng.sample(vocabulary, size)
        start, cut = rng.randint(0, len(haystack) - length), rng.randint(0, length // 2 - size)
        text = haystack[start : start + length - 2 * size]
        found.append((text[:cut] + passage + text[cut:] + passage, size - 1))
    return _rows(found)


def _rows(found: list[tuple[list[int], int]]) -> Rows:
    """From tokens of each row and how many of its last ones are scored."""
    ids = torch.tensor([row for row, _ in found])
    places = torch.arange(ids.shape[1] - 1)
    return Rows(ids, torch.stack([places >= len(places) - count for _, count in found]))
