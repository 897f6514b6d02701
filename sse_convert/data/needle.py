"""The needle form: facts planted in running text, asked for at the end. Builds token rows; scoring is in `retrieval`.

The form is the one small teachers are trained on, a simplification of RULER's NIAH. For the kinds number (7 digits),
word (two words joined by a hyphen) and code (12 hexadecimal digits):

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
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Needles

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


def training_row(
    rng: random.Random,
    haystack_ids: Sequence[int],
    seq_len: int,
    needles: Needles,
    tokenizer: "PreTrainedTokenizerBase",
    words: KeyWords,
) -> list[int]:
    """One training row: needles at random depths, all of them asked and answered in random order, at the end or, for
    the share `needles.early`, anywhere in the text after their needle.

    The number of needles and their kind are drawn from `needles`. Where the row is too short for all of them, questions
    are dropped first, then needles nobody asks for.

    Args:
        rng: source of randomness; equal states give equal rows.
        haystack_ids: tokens of running text; a random stretch of it is used.
        seq_len: tokens of the row.
        needles: counts and kinds to draw from.
        tokenizer: the model's tokenizer.
        words: key words; only `words.train` is used.

    Returns:
        Exactly `seq_len` token ids.

    Raises:
        DataError: not even one needle and its question fit, or the text is shorter than the row needs.
    """
    kind, count = rng.choice(needles.kinds), rng.choice(needles.keys)
    bos = beginning_ids(tokenizer)
    planted, asked, order = _fitting(rng, kind, count, seq_len - len(bos), tokenizer, words)
    used = len(bos) + sum(map(len, planted)) + sum(len(asked[i]) for i in order)
    hay = _stretch(rng, haystack_ids, seq_len - used, seq_len)
    cuts = [rng.randint(0, len(hay)) for _ in planted]
    early = [i for i in order if needles.early and rng.random() < needles.early]
    early_cuts = [rng.randint(cuts[i], len(hay)) for i in early]
    text = _splice(hay, [*planted, *(asked[i] for i in early)], cuts + early_cuts)
    return bos + text + [token for i in order if i not in early for token in asked[i]]


def crowding(seq_len: int, needles: Needles, tokenizer: "PreTrainedTokenizerBase", words: KeyWords) -> str | None:
    """That training rows are too short to ask for half of the largest number of needles, so that more of them ask
    less, in words and with what a row drawn for a trial asks for; None if they are long enough."""
    count = min(max(needles.keys), len(words.train))
    for kind in needles.kinds:
        room = seq_len - len(beginning_ids(tokenizer))
        _, _, order = _fitting(random.Random(0), kind, count, room, tokenizer, words)
        if (asked := len(order)) < count / 2:
            return f"a row of {seq_len:,} tokens with {count:,} needles ({kind}) has room to ask for {asked:,} of them"
    return None


def _fitting(
    rng: random.Random, kind: Kind, count: int, room: int, tokenizer: "PreTrainedTokenizerBase", words: KeyWords
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Tokens of needles, tokens of their questions with answers, and which of them are asked, in what order.

    Where `room` tokens do not hold all, questions are dropped first, then needles nobody asks for; one of each stays.
    """
    keys = rng.sample(words.train, min(count, len(words.train)))
    pairs = [(key, make_value(rng, kind, words.train)) for key in keys]
    planted = _encode_all(tokenizer, [needle_text(kind, k, v) for k, v in pairs])
    asked = [prompt + answer for prompt, answer in _questions(tokenizer, kind, pairs)]
    order = list(range(len(keys)))
    rng.shuffle(order)
    used = sum(map(len, planted)) + sum(map(len, asked))
    while used > room and len(order) > 1:
        used -= len(asked[order.pop()])
    while used > room and len(planted) > 1:
        drop = next(i for i in range(len(planted)) if i != order[0])
        used -= len(planted.pop(drop))
        asked.pop(drop)
        order = [i - (i > drop) for i in order]
    return planted, asked, order


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
    planted = _encode_all(tokenizer, [needle_text(kind, k, v) for k, v in pairs])
    ((prompt, answer),) = _questions(tokenizer, kind, pairs[:1])
    bos = beginning_ids(tokenizer)
    used = len(bos) + sum(map(len, planted)) + len(prompt) + len(answer)
    hay = _stretch(rng, haystack_ids, seq_len - used, seq_len)
    low, high = (round(d * len(hay)) for d in depths)
    cuts = [rng.randint(low, high), *(rng.randint(0, len(hay)) for _ in planted[1:])]
    row = bos + _splice(hay, planted, cuts) + prompt + answer
    return NeedleSample(kind, keys, cuts[0] / max(1, len(hay)), tuple(row), len(answer))


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, without the tokenizer's special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_all(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Token ids of each text as of `encode`, in one call, which a tokenizer makes faster than many."""
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _questions(
    tokenizer: "PreTrainedTokenizerBase", kind: Kind, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of question and answer of each (key, value), split so that their concatenation is how the tokenizer
    writes both in a row."""
    prompts = [question_text(kind, key) for key, _ in pairs]
    answers = [f" {value}." for _, value in pairs]
    texts = [*prompts, *map("".join, zip(prompts, answers, strict=True)), *answers]
    encoded = _encode_all(tokenizer, texts)
    n = len(pairs)
    return [
        (prompt, both[len(prompt) :] if both[: len(prompt)] == prompt else answer)
        for prompt, both, answer in zip(encoded[:n], encoded[n : 2 * n], encoded[2 * n :], strict=True)
    ]


def _stretch(rng: random.Random, haystack_ids: Sequence[int], size: int, seq_len: int) -> list[int]:
    if size < 0:
        raise DataError(
            f"needles and question need {seq_len - size} tokens, the row has {seq_len}",
            expected=f"rows of {seq_len - size} tokens or more",
            fix="use longer rows (seq_len, eval.needle.lengths) or fewer needle keys",
        )
    if len(haystack_ids) < size:
        raise DataError(
            f"the text for needle rows has {len(haystack_ids)} tokens", expected=f"at least {size}", fix="add more text"
        )
    start = rng.randint(0, len(haystack_ids) - size)
    return [int(token) for token in haystack_ids[start : start + size]]


def _splice(hay: list[int], planted: list[list[int]], cuts: list[int]) -> list[int]:
    """`planted` put into `hay` at `cuts`; where several share one, in their order."""
    row: list[int] = []
    previous = 0
    for cut, i in sorted((cut, i) for i, cut in enumerate(cuts)):
        row += hay[previous:cut] + planted[i]
        previous = cut
    return row + hay[previous:]
