"""The wordings of training rows that plant facts and ask for them. None is a wording that an evaluation uses.

Statements are drawn from a list or put together from words (`sentence`), which makes some hundred thousand of them.
`{k}` is a key, `{v}` its value, `{n}` what kind of thing the value is, `{i}` a number. What stands before `{v}` is the
cue, from there on it is the answer. A test compares these templates, and rows made of them, with those of the needle
evaluation and of RULER: no three words in a row are common to both.
"""

import random
from collections.abc import Sequence

NOUNS = (
    "badge", "balance", "chapter", "cipher", "code", "colour", "contract", "debt", "desk", "distance",
    "drawer", "fee", "file", "grade", "height", "key", "label", "licence", "locker", "mark", "nickname", "number",
    "page", "parcel", "password", "payment", "phone", "pin", "plate", "platform", "price", "rank", "receipt",
    "record", "room", "score", "seat", "secret", "serial", "signature", "stamp", "tag", "target", "ticket",
    "title", "total", "value", "weight", "word",
)  # fmt: skip
ADJECTIVES = (
    "ancient", "big", "blue", "brave", "broken", "clever", "cold", "curious", "dark", "early", "final", "first",
    "golden", "green", "heavy", "honest", "last", "late", "little", "lucky", "main", "new", "odd", "old", "plain",
    "private", "quiet", "real", "red", "right", "royal", "second", "secret", "silent", "small", "strange", "true",
    "usual", "wild", "wise",
)  # fmt: skip
OPENINGS = (
    " {d}", " {d}", " {d}", "\n{d}", " ({d}", " Note: {d}", " Here {d}", " And {d}", " In short, {d}", " Remember: {d}",
    " Now {d}", " As we know, {d}", "\n- {d}", " It is told that {d}",
)  # fmt: skip
"""what stands before a statement; {d} are its determiners"""
OWNERS = ("the", "our", "this", "that", "her", "his", "their", "its", "my", "your", "a certain", "another", "every")
AMOUNTS = (
    "among", "of many:", "some of", "two of", "three of", "many of", "most of", "each of", "any of", "half of",
    "few of", "the rest of", "another of", "out of",
)  # fmt: skip
SINGLE = ("one among", "one out of", "one more of", "one in", "one amid", "one by one")
"""as often as all of `AMOUNTS`: a teacher may take what begins with `One` for the only sentence to look up"""
WHOSE = ("the", "our", "these", "those", "her", "his", "their", "your", "my", "all the", "such")
"""`AMOUNTS` or `SINGLE` and these are determiners of statements about one of several"""
PREPOSITIONS = ("of", "from", "with", "to", "about", "behind", "under", "at", "held by", "given to", "known to", "in")
VERBS = ("is", "was", "reads", "equals", "will be", "is now", "says", "=", "remains", "became", "are", "has been")
AGAIN = "\nOnce more."
"""stands before a statement that comes again"""
ASKS = (
    "\nName the {t}.",
    "\nWhich {t}?",
    "\nPlease give the {t}.",
    "\nDo you know the {t}?",
    "\nI need the {t}:",
    "\nQuestion: the {t}? Answer:",
    "\nLooking back, which {t} do you see?",
    "\nWhich was the {t}?",
    "\nFind the {t} and repeat it.",
    "\nWho remembers the {t}?",
    AGAIN,
)
"""what stands before a sentence with the answer; {t} is the thing asked for"""
FACTS = (
    " The {n} of {k} is {v}.",
    " {k} has {n} {v}.",
    " {k}'s {n}: {v}.",
    " Remember that {k} goes with {v}.",
    " In the register, {k} stands beside {v}.",
    " Whoever asks about {k} hears {v}.",
    " To reach {k}, dial {v}.",
    " ({k} = {v})",
    " [{k}] {v};",
    "\n<{k}>{v}</{k}>",
    "\n{k} -> {v}\n",
    "\n{n}[{k}] = {v}\n",
    " They gave {k} the {n} {v}.",
    ' "{k}," he wrote, "{v}."',
    " Under {k} we keep {v}, nothing else.",
    " {n} {k} {v}.",
)
"""statements; a fact is asked for by a question, or none, and the cue of its own or of another statement"""
QUESTIONS = (
    "\nWhich {n} belongs to {k}?",
    "\nDo you recall {k}?",
    "\nQ: {n}, {k}?\nA:",
    "\nTell me the {n} of {k}, please.",
    "\nAgain about {k}.",
    "\nEarlier we read about {k}.",
    "\nFind {k} above.",
)
SHORT_QUESTIONS = (
    "\nQ: {n} of {k}? A: {v}.",
    "\nLook up {k}: {v}.",
    "\nUser: {k}?\nAssistant: {v}\n",
    "\nWhich {n} had {k}? It was {v}.",
    '\n{{"ask": "{k}", "answer": "{v}"}}',
)
"""questions that the bare value answers"""
NUMBERED = (
    "\nFact {i}: {v}.",
    "\n({i}) {v}.",
    "\nEntry {i} reads {v}.",
    "\n§ {i} {v};",
    "\nline {i}\t{v}\n",
)
"""statements whose key is a number; asked for in the same words"""
TABLES = (
    "| {k} | {v} |\n",
    "{k} = {v}\n",
    "{k}\t{v}\n",
    "{k},{v}\n",
    '"{k}": "{v}",\n',
    "{k} ... {v}\n",
    "- {k}: {v}\n",
)
"""rows of a table; asked for as a row again"""
LOOK_UPS = ("Row {k} of that list says {v}.\n", "lookup({k}) gives {v}\n")
SEVERAL = 0.4
"""share of statements made of words that are about one of several"""
RESTATED = 0.5
"""share of questions about them that say it in other words"""
PLAIN = 0.5
"""share of the cues of questions that begin with `The`"""
ANY_WORD = 0.3
"""share of adjectives and nouns that are any words, so that what a fact is called matters less than its key"""
EVALUATED = ("special", "magic")
"""words of the evaluations, which are not among them"""


def noun(rng: random.Random, words: Sequence[str]) -> str:
    """What kind of thing the values of a row are; `words` may stand in for it."""
    return _drawn(rng, NOUNS, words)


def sentence(rng: random.Random, questions: int, words: Sequence[str]) -> tuple[str, list[str]]:
    """A statement made of words, and questions about it with their answers, half of them in other words."""
    adjectives = [_drawn(rng, ADJECTIVES, words) for _ in range(rng.randint(0, 3))]
    preposition = rng.choice(PREPOSITIONS)
    ending = _ending(rng)
    thing = " ".join([*adjectives, "{n}", preposition, "{k}"])
    said = f"{_opening(rng)} {thing}{ending}"
    if rng.random() < SEVERAL:
        said = f"{_opening(rng, _several(rng))} {thing.replace('{n}', '{n}s')}{ending}"
    asked = []
    for _ in range(questions):
        if rng.random() < RESTATED:
            kept = [word for word in adjectives if rng.random() < 0.5]
            other = rng.choice((preposition, rng.choice(PREPOSITIONS)))
            again, end = " ".join([*kept, "{n}", other, "{k}"]), _ending(rng)
        else:
            again, end = thing, ending
        cue = " The" if rng.random() < PLAIN else _opening(rng)
        asked.append(f"{rng.choice(ASKS).replace('{t}', again)}{cue} {again}{end}")
    return said, asked


def _opening(rng: random.Random, determiners: str | None = None) -> str:
    """What stands before the thing that a sentence is about."""
    before, after = rng.choice(OPENINGS).split("{d}")
    chosen = determiners or rng.choice(OWNERS)
    begins = not before.strip(" \n(-")
    return before + (chosen[0].upper() + chosen[1:] if begins else chosen) + after


def _several(rng: random.Random) -> str:
    """Determiners of one of several."""
    return f"{rng.choice(rng.choice((AMOUNTS, SINGLE)))} {rng.choice(WHOSE)}"


def _ending(rng: random.Random) -> str:
    return f" {rng.choice(VERBS)}{rng.choice(('', ':'))} {{v}}."


def _drawn(rng: random.Random, usual: Sequence[str], words: Sequence[str]) -> str:
    """One of the usual words, or any that no evaluation uses."""
    if rng.random() < ANY_WORD and (word := rng.choice(words)) not in EVALUATED:
        return word
    return rng.choice(usual)
