r"""How an answer is checked: one table of scorers, each with what it asks the model for behind the question.

    boxed       the last \boxed{...} is the answer, by `math_answers`                          AIME, MATH500, AMC
    number      the number after the last ####, else the last number                           GSM8K
    choice      the letter of a choice                                                         LongBench v2
    exact       the answer and nothing else, apart from case, punctuation and articles         Table Query, one value
    contains    one of the answers is in the text                                              NoLiMa, HELMET's recall

`exact` reads what follows the last "Answer:" where a text has one. What a model thinks before `</think>` is not looked
at. Scores are 0 or 1.
"""

import dataclasses as dc
import re
import string
from collections.abc import Callable, Iterator, Sequence

from sse_convert.evaluation.math_answers import boxed, same_answer
from sse_convert.recipe.schema import Scorer

Answers = Sequence[tuple[str, ...]]
"""right answers or items of a list, each with other ways to write it"""
THOUGHT = "</think>"
_ANSWER = re.compile(r"\A.*answer\s*(?:is)?\s*:", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_LETTERS = (
    re.compile(r"(?i:answer(?: is|:))\W{0,4}(?:\\boxed\{|\\text\{|option )*\(?([A-Z])\b(?!')"),
    re.compile(r"\\boxed\{\W*(?:\\text\{)?\(?([A-Z])\b"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"^\W*([A-Z])(?:\W|$)"),
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dc.dataclass(frozen=True, slots=True)
class AnswerCheck:
    """One scorer."""

    score: Callable[[str, Answers], float]
    """what a text earns, from the text and the answers"""
    ask: str = ""
    """stands behind the question; a question that brings its whole prompt has none"""


def score(scorer: Scorer, text: str, answers: Answers) -> float:
    """What a generated text earns, 0 or 1.

    Args:
        scorer: name in `SCORERS`.
        text: as generated.
        answers: at least one.
    """
    _, thought, said = text.rpartition(THOUGHT)
    return SCORERS[scorer].score(said.lstrip() if thought else said, answers)


def normalised(text: str) -> str:
    """A text without case, punctuation, articles and double spaces; without case alone where nothing else is left."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    return " ".join(words or text.lower().split())


def _final(text: str) -> str:
    return _ANSWER.sub("", text, count=1).strip()


def _spellings(answers: Answers) -> Iterator[str]:
    return (spelling for answer in answers for spelling in answer)


def _boxed(text: str, answers: Answers) -> float:
    found = boxed(text)
    return float(found is not None and any(same_answer(found, answer) for answer in _spellings(answers)))


def _number(text: str, answers: Answers) -> float:
    given = _last_number(text)
    return float(given is not None and any(given == _last_number(answer) for answer in _spellings(answers)))


def _last_number(text: str) -> float | None:
    found = _NUMBER.search(text.rpartition("####")[2]) if "####" in text else None
    digits = found[0] if found else next(iter(_NUMBER.findall(text)[-1:]), None)
    return None if digits is None else float(digits.replace(",", "").replace("$", ""))


def _choice(text: str, answers: Answers) -> float:
    found = next((letters[-1] for pattern in _LETTERS if (letters := pattern.findall(text))), "")
    return float(found in _spellings(answers))


def _exact(text: str, answers: Answers) -> float:
    given = normalised((_final(text).splitlines() or [""])[0])
    return float(any(given == normalised(answer) for answer in _spellings(answers)))


def _contains(text: str, answers: Answers) -> float:
    given = normalised(text)
    return float(any(normalised(answer) in given for answer in _spellings(answers)))


SCORERS: dict[Scorer, AnswerCheck] = {
    "boxed": AnswerCheck(_boxed, "Please reason step by step, and put your final answer within \\boxed{}."),
    "number": AnswerCheck(_number, "Reason step by step. End with the number alone, on a line that begins with ####."),
    "choice": AnswerCheck(_choice, 'End with "The correct answer is (X)", where X is the letter of your choice.'),
    "exact": AnswerCheck(_exact),
    "contains": AnswerCheck(_contains),
}
