"""The eight needle tasks of RULER (arXiv:2404.06654), text by text, as its version 1 scripts make them.

Templates, needles, counts and haystacks are the published ones. Where ours differ: the haystack of running text is the
user's own (the published essays are not shipped), its sentences end at [.!?] followed by white space (published: NLTK),
random numbers come from Python's generator with our seeds, and the keys of kind "words" are drawn as an adjective and a
noun, which is uniform over the same 6,171,620 pairs.
"""

import dataclasses as dc
import random
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sse_convert.data.text_files import check_text, find_files
from sse_convert.errors import DependencyError

Kind = Literal["words", "numbers", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = " The special magic {kind} for {query} mentioned in the provided text are"
DEPTHS = [round(100 * i / 39) for i in range(40)]
"""percent of the sentences of running text before a needle"""
NEEDLE_ORDER_SEED = 42


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class RulerTask:
    """One of the published settings."""

    haystack: Literal["noise", "essay", "needle"]
    """a repeated sentence, running text, or lines that look like needles"""
    key: Kind = "words"
    """kind of the keys"""
    value: Kind = "numbers"
    """kind of the values"""
    keys: int = 1
    """needles' keys in the text"""
    values: int = 1
    """values of each key"""
    queries: int = 1
    """keys asked for"""


RULER_TASKS = {
    "niah_single_1": RulerTask(haystack="noise"),
    "niah_single_2": RulerTask(haystack="essay"),
    "niah_single_3": RulerTask(haystack="essay", value="uuids"),
    "niah_multikey_1": RulerTask(haystack="essay", keys=4),
    "niah_multikey_2": RulerTask(haystack="needle"),
    "niah_multikey_3": RulerTask(haystack="needle", key="uuids", value="uuids"),
    "niah_multivalue": RulerTask(haystack="essay", values=4),
    "niah_multiquery": RulerTask(haystack="essay", keys=4, queries=4),
}


@dc.dataclass(frozen=True, slots=True)
class Material:
    """What random texts are made of."""

    adjectives: tuple[str, ...]
    """first halves of word keys, sorted"""
    nouns: tuple[str, ...]
    """second halves"""
    essay: tuple[str, ...] = ()
    """words of the running text; repeated when a haystack is longer"""


@dc.dataclass(frozen=True, slots=True)
class RulerText:
    """One example."""

    question: str
    """everything up to the answer"""
    lead: str
    """how the answer begins, up to the values"""
    answers: tuple[str, ...]
    """the values asked for"""
    others: tuple[str, ...]
    """all other values in the text"""
    depth: float | None
    """share of the haystack before the asked needle, None where several are asked for"""


def load_material(text: str | None) -> Material:
    """The word lists of the package wonderwords, as published, and the words of a text file or folder.

    Raises:
        DependencyError: wonderwords is not installed.
        DataError: the text cannot be read.
    """
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise DependencyError(
            "RULER's keys come from the word lists of wonderwords, which is not installed",
            fix="pip install 'sse-convert[eval]'",
        ) from error
    source = RandomWord()
    adjectives, nouns = (sorted(set(source.filter(include_categories=[kind]))) for kind in ("adjective", "noun"))
    essay: list[str] = []
    for file in find_files(Path(text)) if text else []:
        check_text(file)
        essay += file.read_text(encoding="utf-8").split()
    return Material(tuple(adjectives), tuple(nouns), tuple(essay))


def make_text(rng: random.Random, task: RulerTask, size: int, material: Material) -> RulerText:
    """One random example.

    Args:
        rng: source of randomness; equal states give equal examples.
        task: the setting.
        size: words of running text, or lines of the other haystacks; at least as many lines as needles.
        material: word lists and running text.
    """
    keys = [_draw(rng, task.key, material) for _ in range(task.keys)]
    values = [[_draw(rng, task.value, material) for _ in range(task.values)] for _ in keys]
    needles = [(key, value) for key, own in zip(keys, values, strict=True) for value in own]
    random.Random(NEEDLE_ORDER_SEED).shuffle(needles)
    others: list[str] = []
    if task.haystack == "essay":
        context, depths = _in_sentences(rng, task, needles, size, material.essay)
    else:
        context, depths, others = _in_lines(rng, task, needles, size, material)
    asked = rng.sample(range(task.keys), task.queries)
    query = _listed([keys[i] for i in asked])
    answers = [value for i in asked for value in values[i]]
    others += [value for _, value in needles if value not in answers]
    depth = next(d for d, (_, value) in zip(depths, needles, strict=True) if value == answers[0])
    question, lead = wording(len(answers))
    return RulerText(
        question=question.format(kind=_kind(task, len(answers)), context=context, query=query),
        lead=lead.format(kind=_kind(task, len(answers)), query=query),
        answers=tuple(answers),
        others=tuple(others),
        depth=depth if len(answers) == 1 else None,
    )


def _draw(rng: random.Random, kind: Kind, material: Material) -> str:
    if kind == "words":
        return f"{rng.choice(material.adjectives)}-{rng.choice(material.nouns)}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def more_values(rng: random.Random, task: RulerTask, text: RulerText, count: int, material: Material) -> list[str]:
    """`count` wrong values: others of the text first, in random order, then new ones of the same kind."""
    wrong = [value for value in dict.fromkeys(text.others) if value not in text.answers]
    chosen = rng.sample(wrong, min(count, len(wrong)))
    while len(chosen) < count:
        value = _draw(rng, task.value, material)
        if value not in chosen and value not in text.answers:
            chosen.append(value)
    return chosen


def _needle(task: RulerTask, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)


def _in_sentences(
    rng: random.Random, task: RulerTask, needles: list[tuple[str, str]], size: int, essay: Sequence[str]
) -> tuple[str, list[float]]:
    """Running text with needles between its sentences, and the share of the sentences before each needle."""
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(words))
    cuts = [int(len(sentences) * depth / 100) for depth in sorted(rng.sample(DEPTHS, len(needles)))]
    pieces: list[str] = []
    start = 0
    for cut, needle in zip(cuts, needles, strict=True):
        pieces += [*sentences[start:cut], _needle(task, *needle)]
        start = cut
    return " ".join([*pieces, *sentences[start:]]), [cut / len(sentences) for cut in cuts]


def _in_lines(
    rng: random.Random, task: RulerTask, needles: list[tuple[str, str]], size: int, material: Material
) -> tuple[str, list[float], list[str]]:
    """Lines with needles among them, the share of the lines before each needle, and the values of the other lines."""
    others: list[str] = []
    lines = [NOISE] * size
    if task.haystack == "needle":
        others = [_draw(rng, task.value, material) for _ in range(size)]
        lines = [_needle(task, _draw(rng, task.key, material), value) for value in others]
    places = sorted(rng.sample(range(size), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, _needle(task, *needle))
    return "\n".join(lines), [place / size for place in places], others


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def _kind(task: RulerTask, answers: int) -> str:
    """`numbers`, or `number` where one answer is asked for in all."""
    return task.value.removesuffix("s") if answers == 1 else task.value


def wording(answers: int) -> tuple[str, str]:
    """Question and beginning of the answer, in the singular where one answer is asked for in all."""
    if answers > 1:
        return QUESTION, ANSWER
    question = QUESTION.replace("Some", "A").replace("are all", "is").replace("are", "is")
    return question, ANSWER.replace("are", "is")
