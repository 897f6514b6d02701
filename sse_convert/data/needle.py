"""The needle form: facts planted in running text, asked for at the end. Builds token rows; scoring is in `retrieval`.

The form is one that small teachers can learn, a simplification of RULER's NIAH; training rows (`recall_rows`)
never have it. For the kinds number (7 digits), word (two words joined by a hyphen) and code (12 hexadecimal digits):

    needle    ` One of the special magic {kind}s for {key} is: {value}.`   spliced between two tokens of the text
    question  `\\nWhat is the special magic {kind} for {key}? The special magic {kind} for {key} is:`   at the very end
    answer    ` {value}.`

Rows are spliced token by token, so a row has exactly the asked number of tokens with any tokenizer. Keys are single
words. A word is an evaluation key or a training key, decided by its CRC-32, never both: what is measured is retrieval
of keys the training never asked for. Values of the kind word are made of training words in both cases. The depth of a
needle is the share of the text that stands before it: 0 at the start, 1 right before the question.
"""

import dataclasses as dc
import json
import random
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sse_convert.data.documents import beginning_ids
from sse_convert.data.tokens import token_ids
from sse_convert.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["number", "word", "code"]
HELD_OUT_ONE_IN = 8
"""one word in this many is an evaluation key"""


@dc.dataclass(frozen=True, slots=True)
class KeyWords:
    """Key words, split into those training may use and those evaluation asks for."""

    train: tuple[str, ...]
    """training keys, and the parts of all values of kind word"""
    held_out: tuple[str, ...]
    """evaluation keys"""


@dc.dataclass(frozen=True, slots=True)
class NeedleSample:
    """One evaluation row: text with needles, the question, and the answer as its last tokens."""

    kind: Kind
    """kind of the values"""
    keys: int
    """needles in the text"""
    depth: float
    """share of the text before the asked needle, 0 to 1"""
    token_ids: tuple[int, ...]
    """the whole row, answer included"""
    answer_len: int
    """tokens of the answer, the last ones of the row"""


def load_words(path: str | Path | None = None) -> KeyWords:
    """Read key words from a JSON list of strings, or the built-in list, and split them by hash.

    Raises:
        DataError: the file cannot be read, is not a list of distinct words, or leaves one side of the split empty.
    """
    if path is None:
        text = resources.files("sse_convert.data").joinpath("needle_words.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"needle words {path} cannot be read: {error}", expected="a UTF-8 JSON list of words"
            ) from error
    try:
        words = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"needle words {path} are not JSON: {error}", expected='a list such as ["acorn", ...]'
        ) from error
    if not isinstance(words, list) or not all(isinstance(w, str) and w.strip() == w and w for w in words):
        raise DataError(f"needle words {path} are not a list of words", expected='a list such as ["acorn", ...]')
    if len(set(words)) != len(words):
        twice = sorted({w for w in words if words.count(w) > 1})[:5]
        raise DataError(f"needle words {path} hold duplicates: {twice}", fix="remove them")
    held_out = tuple(w for w in words if _is_held_out(w))
    train = tuple(w for w in words if not _is_held_out(w))
    if not held_out or not train:
        raise DataError(
            f"needle words {path}: {len(words)} words split into {len(train)} for training and {len(held_out)} for "
            "evaluation",
            expected="enough words for both, a few hundred or more",
        )
    return KeyWords(train, held_out)


def _is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % HELD_OUT_ONE_IN == 0


def make_value(rng: random.Random, kind: Kind, words: Sequence[str]) -> str:
    """Draw a value: 7 digits, two words joined by a hyphen, or 12 hexadecimal digits."""
    if kind == "number":
        return str(rng.randrange(10**6, 10**7))
    if kind == "word":
        return f"{rng.choice(words)}-{rng.choice(words)}"
    return "".join(rng.choice("0123456789abcdef") for _ in range(12))


def needle_text(kind: Kind, key: str, value: str) -> str:
    """The planted sentence, leading space included."""
    return f" One of the special magic {kind}s for {key} is: {value}."


def question_text(kind: Kind, key: str) -> str:
    """The question, leading line break included; the answer text ` {value}.` follows it."""
    return f"\nWhat is the special magic {kind} for {key}? The special magic {kind} for {key} is:"


def evaluation_sample(
    rng: random.Random,
    haystack_ids: Sequence[int],
    seq_len: int,
    *,
    kind: Kind,
    keys: int,
    tokenizer: "PreTrainedTokenizerBase",
    words: KeyWords,
    depths: tuple[float, float] = (0.0, 1.0),
) -> NeedleSample:
    """One evaluation row: `keys` needles at random depths, one of them asked for.

    Args:
        rng: source of randomness; equal states give equal samples.
        haystack_ids: tokens of held-out running text; a random stretch of it is used.
        seq_len: tokens of the row, question and answer included.
        kind: kind of the values.
        keys: needles in the text; their key words come from `words.held_out`.
        tokenizer: the model's tokenizer.
        words: key words.
        depths: the asked needle's depth is drawn uniformly from this range.

    Raises:
        DataError: needles and question do not fit, the text is too short, or there are too few key words.
    """
    if not 1 <= keys <= len(words.held_out):
        raise DataError(f"{keys} needle keys asked for", expected=f"1 to {len(words.held_out)}, the held-out key words")
    chosen = rng.sample(words.held_out, keys)
    values = [make_value(rng, kind, words.train) for _ in chosen]
    pairs = list(zip(chosen, values, strict=True))
    planted = token_ids(tokenizer, [needle_text(kind, k, v) for k, v in pairs])
    ((prompt, answer),) = _questions(tokenizer, kind, pairs[:1])
    bos = beginning_ids(tokenizer)
    used = len(bos) + sum(map(len, planted)) + len(prompt) + len(answer)
    hay = text_stretch(rng, haystack_ids, seq_len - used, seq_len)
    low, high = (round(d * len(hay)) for d in depths)
    cuts = [rng.randint(low, high), *(rng.randint(0, len(hay)) for _ in planted[1:])]
    row = bos + splice(hay, planted, cuts) + prompt + answer
    return NeedleSample(kind, keys, cuts[0] / max(1, len(hay)), tuple(row), len(answer))


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, without the tokenizer's special tokens around it."""
    return token_ids(tokenizer, [text])[0]


def _questions(
    tokenizer: "PreTrainedTokenizerBase", kind: Kind, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of question and answer of each (key, value), split so that their concatenation is how the tokenizer
    writes both in a row."""
    prompts = [question_text(kind, key) for key, _ in pairs]
    answers = [f" {value}." for _, value in pairs]
    texts = [*prompts, *map("".join, zip(prompts, answers, strict=True)), *answers]
    encoded = token_ids(tokenizer, texts)
    n = len(pairs)
    return [
        (prompt, both[len(prompt) :] if both[: len(prompt)] == prompt else answer)
        for prompt, both, answer in zip(encoded[:n], encoded[n : 2 * n], encoded[2 * n :], strict=True)
    ]


def text_stretch(rng: random.Random, haystack_ids: Sequence[int], size: int, seq_len: int) -> list[int]:
    """A random stretch of `size` tokens of running text for a row of `seq_len`.

    Raises:
        DataError: the row or the text is too short.
    """
    if size < 0:
        raise too_short(seq_len - size, seq_len)
    if len(haystack_ids) < size:
        raise DataError(
            f"the text for needle rows has {len(haystack_ids)} tokens", expected=f"at least {size}", fix="add more text"
        )
    start = rng.randint(0, len(haystack_ids) - size)
    return [int(token) for token in haystack_ids[start : start + size]]


def too_short(needed: int, seq_len: int) -> DataError:
    """The error for a row that cannot hold what it is to hold."""
    return DataError(
        f"needles and question need {needed} tokens, the row has {seq_len}",
        expected=f"rows of {needed} tokens or more",
        fix="use longer rows (seq_len, eval.needle.lengths) or fewer needle keys",
    )


def splice(hay: list[int], planted: list[list[int]], cuts: list[int]) -> list[int]:
    """`planted` put into `hay` at `cuts`; where several share one, in their order."""
    row: list[int] = []
    previous = 0
    for cut, i in sorted((cut, i) for i, cut in enumerate(cuts)):
        row += hay[previous:cut] + planted[i]
        previous = cut
    return row + hay[previous:]
