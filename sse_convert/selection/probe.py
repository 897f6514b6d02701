"""What every choice of layers is asked: text to predict, and rows whose answer stands far back.

R rows, T tokens per row.
"""

import dataclasses as dc
import itertools
import random
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sse_convert.data.needle import load_words
from sse_convert.data.rows import RowReader, stack
from sse_convert.data.teacher_samples import SamplingTeacher
from sse_convert.errors import DataError
from sse_convert.evaluation.retrieval import needle_samples
from sse_convert.recipe.schema import NeedleEval, Recipe, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RecallKind = Literal["needle", "copy"]
NEEDLE_KEYS = 4
"""needles in a row, one of which is asked for"""
PASSAGE = 32
"""tokens that a copy row repeats"""


@dc.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens, and which predictions in them count."""

    ids: Tensor
    """int64 [R, T]"""
    asked: Tensor
    """bool [R, T - 1], True where the next token is scored"""


@dc.dataclass(frozen=True, slots=True)
class Probe:
    """Rows for one model, made once."""

    text: Rows
    """running text, every token scored"""
    recall: dict[RecallKind, Rows]
    """needle: planted facts and a question, the answer scored (see `evaluation.needle`); copy: random tokens that come
    again at the end, the second time scored"""

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.text.ids.shape[1]

    def fingerprint(self) -> list[list[int]]:
        """Every token of every row."""
        rows = torch.cat([self.text.ids, *(rows.ids for rows in self.recall.values())])
        return rows.tolist()


def make_probe(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    sources: list[Source],
    *,
    tokens: int,
    length: int,
    samples: int,
    vocab_size: int,
) -> Probe:
    """Read the text and plant the needles.

    Args:
        recipe: `model`, `data.seed` and `data.needles.words` are read.
        tokenizer: the model's.
        sources: text, read once in file order; packed rows are taken as running text.
        tokens: of running text, rounded down to whole rows.
        length: T.
        samples: rows of each recall kind.
        vocab_size: rows of the embedding, to refuse a foreign tokenizer.

    Raises:
        DataError: the text is not usable or too short, or needles do not fit into a row.
    """
    count, seed = tokens // length, recipe.data.seed
    reader = RowReader(
        sources,
        tokenizer,
        length,
        seed,
        role="valid",
        teacher=SamplingTeacher(recipe.model, recipe.revision),
        vocab_size=vocab_size,
    )
    read = stack(list(itertools.islice(reader.rows(), 2 * count + 2)))["input_ids"]
    if len(read) < count + 2:
        raise DataError(
            f"the text gives {len(read)} rows of {length} tokens",
            expected=f"{count} rows to predict and two to plant needles in",
            fix="give more text, or lower --tokens or --length",
        )
    special = set(tokenizer.all_special_ids)
    haystack = [token for token in read[count:].flatten().tolist() if token not in special]
    needles = NeedleEval(lengths=[length], samples=samples, keys=[NEEDLE_KEYS])
    (planted,) = needle_samples(needles, haystack, tokenizer, load_words(recipe.data.needles.words), seed)
    asked = torch.zeros(samples, length - 1, dtype=torch.bool)
    for row, sample in zip(asked, planted, strict=True):
        row[-sample.answer_len :] = True
    text = read[:count]
    return Probe(
        text=Rows(text, torch.ones(count, length - 1, dtype=torch.bool)),
        recall={
            "needle": Rows(torch.tensor([sample.token_ids for sample in planted]), asked),
            "copy": copy_rows(random.Random(f"{seed} copy"), haystack, samples, length),
        },
    )


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
    rows = []
    for _ in range(samples):
        passage = rng.sample(vocabulary, size)
        start, cut = rng.randint(0, len(haystack) - length), rng.randint(0, length // 2 - size)
        text = haystack[start : start + length - 2 * size]
        rows.append(text[:cut] + passage + text[cut:] + passage)
    asked = torch.zeros(samples, length - 1, dtype=torch.bool)
    asked[:, -(size - 1) :] = True
    return Rows(torch.tensor(rows), asked)
