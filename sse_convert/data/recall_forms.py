"""Many forms of things to be recalled, so that what training teaches is looking back and not a wording.

A form makes items: parts that stand somewhere in the row, in the wordings of `recall_templates`, and questions about
them with answers. `recall_rows` puts items into rows.
"""

import dataclasses as dc
import random
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sse_convert.data import recall_templates as templates
from sse_convert.data.needle import encode
from sse_convert.data.tokens import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ASKED = 4
"""times at most that a row with facts or a table asks for each of those it asks for"""
SENTENCES = 0.6
"""share of the rows with facts whose statement is put together from words"""


@dc.dataclass(frozen=True, slots=True)
class Asked:
    """A question."""

    prompt: list[int]
    """tokens up to the answer"""
    answer: list[int]
    """tokens to be recalled"""


@dc.dataclass(frozen=True, slots=True)
class Item:
    """Something to be recalled."""

    parts: list[list[int]]
    """tokens to be planted, in this order"""
    asked: list[Asked]
    """questions about it; they stand behind the last part"""


@dc.dataclass(frozen=True, slots=True)
class Draw:
    """What forms draw from."""

    rng: random.Random
    """source of randomness; equal states give equal items"""
    count: int
    """items to make"""
    kind: str
    """kind of the values: number, word, code or uuid"""
    words: Sequence[str]
    """training words"""
    tokenizer: "PreTrainedTokenizerBase"
    """the model's tokenizer"""
    size: int = 4
    """rows of a table for each question about it"""

    def keys(self, count: int) -> list[str]:
        """Different keys of one kind: mostly words, else two words, or names of letters and digits."""
        make = self.rng.choice((self._word,) * 6 + (self._two_words,) * 2 + (self._name,))
        found: dict[str, None] = {}
        while len(found) < count:
            found[make()] = None
            if len(found) >= len(self.words):
                make = self._name
        return list(found)

    def value(self) -> str:
        """A short or long value of the row's kind."""
        if self.kind == "number":
            return "".join(self.rng.choice("0123456789") for _ in range(self.rng.randint(2, 10)))
        if self.kind == "word":
            return self.rng.choice(" -").join(self.rng.choices(self.words, k=self.rng.randint(1, 3)))
        if self.kind == "uuid":
            return self._uuid()
        return self._characters(self.rng.choice(("0123456789abcdef", _CAPITALS)), self.rng.randint(4, 16))

    def _word(self) -> str:
        return self.rng.choice(self.words)

    def _two_words(self) -> str:
        return f"{self.rng.choice(self.words)}-{self.rng.choice(self.words)}"

    def _name(self) -> str:
        return self._characters(_CAPITALS, self.rng.randint(3, 6))

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _characters(self, letters: str, count: int) -> str:
        return "".join(self.rng.choices(letters, k=count))


_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def _facts(draw: Draw) -> list[Item]:
    """Sentences; asked for in their own words, in other words, or by a question alone."""
    rng, items = draw.rng, []
    noun, times = templates.noun(rng, draw.words), rng.randint(1, MOST_ASKED)
    if rng.random() < SENTENCES:
        said, wordings = templates.sentence(rng, MOST_ASKED, draw.words)
    else:
        said, wordings = _listed(rng, MOST_ASKED)
    for key in draw.keys(draw.count):
        values = {"k": key, "v": draw.value(), "n": noun}
        parts = token_ids(draw.tokenizer, [said.format(**values)])
        items.append(Item(parts, [_asked(draw, rng.choice(wordings), values) for _ in range(times)]))
    return items


def _numbered(draw: Draw) -> list[Item]:
    """Statements that have a number, and come again by it."""
    said = draw.rng.choice(templates.NUMBERED)
    numbers = draw.rng.sample(range(1, max(100, 3 * draw.count)), draw.count)
    items = []
    for i in numbers:
        values = {"i": str(i), "v": draw.value()}
        items.append(Item(token_ids(draw.tokenizer, [said.format(**values)]), [_asked(draw, said, values)]))
    return items


def _table(draw: Draw) -> list[Item]:
    """One table of keys and values, of which some rows are asked for."""
    said = draw.rng.choice(templates.TABLES)
    asked = "\n" + draw.rng.choice((said, said, *templates.LOOK_UPS))
    rows = [{"k": key, "v": draw.value()} for key in draw.keys(draw.size * draw.count)]
    text = "\n" + "".join(said.format(**row) for row in rows)
    chosen = draw.rng.sample(rows, draw.count) * draw.rng.randint(1, MOST_ASKED)
    return [Item([encode(draw.tokenizer, text)], [_asked(draw, asked, row) for row in chosen])]


def _listed(rng: random.Random, questions: int) -> tuple[str, list[str]]:
    """A statement of the list, and questions about it with their answers."""
    said, asked = rng.choice(templates.FACTS), []
    for _ in range(questions):
        question, other = rng.choice(templates.QUESTIONS), rng.choice(templates.FACTS)
        asked.append(
            rng.choice(
                (templates.AGAIN + said, question + said, question + other, rng.choice(templates.SHORT_QUESTIONS))
            )
        )
    return said, asked


FORMS: dict[str, Callable[[Draw], list[Item]]] = {
    "facts": _facts,
    "numbered": _numbered,
    "table": _table,
}
"""name in recipes -> what makes its items"""


def _asked(draw: Draw, template: str, values: dict[str, str]) -> Asked:
    """Tokens of a question whose answer begins with the value, as the tokenizer writes both together."""
    cue, tail = template.split("{v}")
    space = " " if cue.endswith(" ") else ""
    texts = [cue.removesuffix(" ").format(**values), template.format(**values)]
    prompt, both = token_ids(draw.tokenizer, texts)
    if both[: len(prompt)] == prompt:
        return Asked(prompt, both[len(prompt) :])
    return Asked(prompt, encode(draw.tokenizer, space + values["v"] + tail.format(**values)))
