"""Training rows with something to be recalled: items of one form, put into running text.

Rows are spliced token by token, so a row has exactly the asked number of tokens with any tokenizer.
"""

import dataclasses as dc
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sse_convert.data.documents import beginning_ids
from sse_convert.data.needle import KeyWords, text_stretch, too_short
from sse_convert.data.recall_forms import FORMS, Asked, Draw, Item
from sse_convert.recipe.schema import Needles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REDRAWS = 8
"""tries to find an item of one question that is short enough"""
REPEATED = 0.15
"""share of the rows whose text is one passage again and again"""
PASSAGE = (12, 200)
"""tokens of that passage, shortest and longest"""


@dc.dataclass(frozen=True, slots=True)
class RecallRow:
    """One row."""

    form: str
    """name of its form"""
    token_ids: list[int]
    """[T]"""
    answers: list[bool]
    """[T] whether a token belongs to an answer"""


def recall_row(
    rng: random.Random,
    haystack_ids: Sequence[int],
    seq_len: int,
    needles: Needles,
    tokenizer: "PreTrainedTokenizerBase",
    words: KeyWords,
) -> RecallRow:
    """One training row: items of one form at random depths, asked for and answered in random order, at the end or, for
    the share `needles.early`, anywhere in the text after their last part.

    Form, number and kind of the items are drawn from `needles`. Where the row is too short, questions are dropped
    first, and if not even one fits with all parts, half as many items are made.

    Args:
        rng: source of randomness; equal states give equal rows.
        haystack_ids: tokens of running text; a random stretch of it is used.
        seq_len: tokens of the row (T).
        needles: forms, counts and kinds to draw from.
        tokenizer: the model's tokenizer.
        words: key words; only `words.train` is used.

    Raises:
        DataError: not even one item and its question fit, or the text is shorter than the row.
    """
    beginning = beginning_ids(tokenizer)
    form = rng.choices(list(needles.forms), list(needles.forms.values()))[0]
    kind, count = rng.choice(needles.kinds), min(rng.choice(needles.keys), len(words.train))
    if (room := seq_len - len(beginning)) < 2:
        raise too_short(len(beginning) + 2, seq_len)
    text = _haystack(rng, haystack_ids, room, seq_len)
    items, asked = _fitting(form, Draw(rng, count, kind, words.train, tokenizer), room)
    if (used := _size(items, asked)) > room:
        raise too_short(used + len(beginning), seq_len)
    del text[room - used :]
    pieces, last = _planted(rng, items, len(text))
    early = [needles.early > 0 and rng.random() < needles.early for _ in asked]
    for (i, one), soon in sorted(zip(asked, early, strict=True), key=lambda pair: not pair[1]):
        pieces.append(_Piece(rng.randint(last[i], len(text)) if soon else len(text), one))
    return RecallRow(form, *_spliced(beginning, text, pieces))


def crowding(seq_len: int, needles: Needles, tokenizer: "PreTrainedTokenizerBase", words: KeyWords) -> str | None:
    """That training rows are too short to ask for half of the largest number of needles, so that more of them ask
    less, in words and with what a row drawn for a trial asks for; None if they are long enough."""
    count, room = min(max(needles.keys), len(words.train)), seq_len - len(beginning_ids(tokenizer))
    for form, kind in itertools.product(needles.drawn_forms, needles.kinds):
        draw = Draw(random.Random(0), count, kind, words.train, tokenizer)
        if (asked := len(_fitting(form, draw, room)[1])) < count / 2:
            return f"a row of {seq_len:,} tokens with {count:,} needles ({form}, {kind}) has room for {asked:,} of them"
    return None


def _haystack(rng: random.Random, ids: Sequence[int], size: int, seq_len: int) -> list[int]:
    """Running text to plant in: a stretch of it, or one passage of that again and again."""
    text = text_stretch(rng, ids, size, seq_len)
    if rng.random() >= REPEATED:
        return text
    passage = text[: rng.randint(*PASSAGE)]
    return list(itertools.islice(itertools.cycle(passage), size))


@dc.dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens put into the text."""

    cut: int
    """tokens of the text before it"""
    what: Asked | list[int]
    """a question with its answer, or a part of an item"""


def _fitting(form: str, draw: Draw, room: int) -> tuple[list[Item], list[tuple[int, Asked]]]:
    """Items, and the questions that are asked, in their order, each with the number of its item.

    Where `room` tokens do not hold half of the questions, fewer and smaller items are made.
    """
    for smaller in _smaller(draw):
        items = FORMS[form](smaller)
        asked = [(i, one) for i, item in enumerate(items) for one in item.asked]
        draw.rng.shuffle(asked)
        left = room - _size(items, [])
        totals = itertools.accumulate(_size([], [one]) for one in asked)
        fitting = sum(total <= left for total in totals)
        if fitting >= max(1, len(asked) / 2):
            break
    return items, asked[: max(1, fitting)]


def _smaller(draw: Draw) -> Iterator[Draw]:
    """A draw, then half as many items again and again, then half the size of one, then the smallest some more times."""
    yield draw
    while draw.count > 1:
        draw = dc.replace(draw, count=draw.count // 2)
        yield draw
    while draw.size > 1:
        draw = dc.replace(draw, size=draw.size // 2)
        yield draw
    yield from itertools.repeat(draw, REDRAWS)


def _size(items: list[Item], asked: list[tuple[int, Asked]]) -> int:
    parts = sum(len(part) for item in items for part in item.parts)
    return parts + sum(len(one.prompt) + len(one.answer) for _, one in asked)


def _planted(rng: random.Random, items: list[Item], size: int) -> tuple[list[_Piece], list[int]]:
    """The parts of all items at random depths, and for each item how much text stands before its last part."""
    pieces, last = [], []
    for item in items:
        cuts = sorted(rng.randint(0, size) for _ in item.parts)
        pieces += [_Piece(cut, part) for cut, part in zip(cuts, item.parts, strict=True)]
        last.append(cuts[-1])
    return pieces, last


def _spliced(beginning: list[int], text: list[int], pieces: list[_Piece]) -> tuple[list[int], list[bool]]:
    """Tokens of the row, and which are answers; of pieces that share a cut the first stands first."""
    row, answers, previous = list(beginning), [False] * len(beginning), 0
    for piece in sorted(pieces, key=lambda piece: piece.cut):
        what = piece.what
        prompt, answer = (what.prompt, what.answer) if isinstance(what, Asked) else (what, [])
        before = text[previous : piece.cut] + prompt
        row += before + answer
        answers += [False] * len(before) + [True] * len(answer)
        previous = piece.cut
    return row + text[previous:], answers + [False] * len(text[previous:])
