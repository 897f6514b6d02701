r"""How an answer is checked: one table of scorers, each with what it asks the model for behind the question.

    boxed       the last \boxed{...} is the answer, by `math_answers`                          AIME, MATH500, AMC
    number      the number after the last ####, else the last number                           GSM8K
    choice      the letter of a choice                                                         LongBench v2
    exact       the answer and nothing else, apart from case, punctuation and articles         Table Query, one value
    contains    one of the answers is in the text                                              NoLiMa, HELMET's recall
    coverage    share of the answers that are in the text                                      Qampari
    f1          words shared with the nearest answer                                           HELMET, LOFT's questions
    list_f1     the listed items against the answers                                           Quest, Qampari
    list_exact  the listed items are the answers, all and no other                             Table Query
    rouge       ROUGE-L with the nearest answer (extra `eval`)                                 HELMET's summaries
    ratio       likeness of the characters, 0 without the prefix that was asked for            MRCR

`exact`, `f1` and the lists read what follows the last "Answer:" where a text has one. What a model thinks before
`</think>` is not looked at. Scores are from 0 to 1.
"""

import ast
import dataclasses as dc
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher

from sse_convert.errors import DependencyError
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
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dc.dataclass(frozen=True, slots=True)
class AnswerCheck:
    """One scorer."""

    score: Callable[[str, Answers, str], float]
    """share from 0 to 1 that a text earns, from the text, the answers and a prefix that the text must begin with"""
    ask: str = ""
    """stands behind the question; a question that brings its whole prompt has none"""


def score(scorer: Scorer, text: str, answers: Answers, prefix: str = "") -> float:
    """What a generated text earns, from 0 to 1.

    Args:
        scorer: name in `SCORERS`.
        text: as generated.
        answers: at least one.
        prefix: what the text was told to begin with; only `ratio` asks for it.

    Raises:
        DependencyError: `rouge` needs a package that is not installed.
    """
    _, thought, said = text.rpartition(THOUGHT)
    return SCORERS[scorer].score(said.lstrip() if thought else said, answers, prefix)


def normalised(text: str) -> str:
    """A text without case, punctuation, articles and double spaces; without case alone where nothing else is left."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    return " ".join(words or text.lower().split())


def listed(text: str) -> list[str]:
    """The items that a text lists: a list in brackets, else lines, else parts between commas of a single line."""
    text = _final(text)
    if brackets := re.findall(r"\[[^][]*\]", text):
        try:
            return [str(item) for item in ast.literal_eval(brackets[-1])]
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return [part.strip(" '\"") for part in brackets[-1][1:-1].split(",") if part.strip()]
    lines = [_BULLET.sub("", line).strip() for line in text.splitlines() if line.strip()]
    return [part.strip() for part in lines[0].split(",") if part.strip()] if len(lines) == 1 else lines


def _final(text: str) -> str:
    return _ANSWER.sub("", text, count=1).strip()


def _spellings(answers: Answers) -> Iterator[str]:
    return (spelling for answer in answers for spelling in answer)


def _boxed(text: str, answers: Answers, prefix: str) -> float:
    found = boxed(text)
    return float(found is not None and any(same_answer(found, answer) for answer in _spellings(answers)))


def _number(text: str, answers: Answers, prefix: str) -> float:
    given = _last_number(text)
    return float(given is not None and any(given == _last_number(answer) for answer in _spellings(answers)))


def _last_number(text: str) -> float | None:
    found = _NUMBER.search(text.rpartition("####")[2]) if "####" in text else None
    digits = found[0] if found else next(iter(_NUMBER.findall(text)[-1:]), None)
    return None if digits is None else float(digits.replace(",", "").replace("$", ""))


def _choice(text: str, answers: Answers, prefix: str) -> float:
    found = next((letters[-1] for pattern in _LETTERS if (letters := pattern.findall(text))), "")
    return float(found in _spellings(answers))


def _exact(text: str, answers: Answers, prefix: str) -> float:
    given = normalised((_final(text).splitlines() or [""])[0])
    return float(any(given == normalised(answer) for answer in _spellings(answers)))


def _contains(text: str, answers: Answers, prefix: str) -> float:
    return float(_coverage(text, answers, prefix) > 0)


def _coverage(text: str, answers: Answers, prefix: str) -> float:
    given = normalised(text)
    return sum(any(normalised(spelling) in given for spelling in answer) for answer in answers) / len(answers)


def _f1(text: str, answers: Answers, prefix: str) -> float:
    given = normalised(_final(text)).split()
    return max(_word_f1(given, normalised(answer).split()) for answer in _spellings(answers))


def _word_f1(given: list[str], expected: list[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    return 2 * sum((Counter(given) & Counter(expected)).values()) / (len(given) + len(expected))


def _list_f1(text: str, answers: Answers, prefix: str) -> float:
    given = {normalised(item) for item in listed(text)}
    left = [{normalised(spelling) for spelling in answer} for answer in answers]
    for item in sorted(given):
        if (found := next((answer for answer in left if item in answer), None)) is not None:
            left.remove(found)
    return 2 * (len(answers) - len(left)) / (len(given) + len(answers))


def _list_exact(text: str, answers: Answers, prefix: str) -> float:
    return float(_list_f1(text, answers, prefix) == 1)


def _rouge(text: str, answers: Answers, prefix: str) -> float:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise DependencyError(
            "scorer rouge needs rouge-score, which is not installed", fix="pip install 'sse-convert[eval]'"
        ) from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max(float(scorer.score(answer, text)["rougeL"].fmeasure) for answer in _spellings(answers))


def _ratio(text: str, answers: Answers, prefix: str) -> float:
    if not text.startswith(prefix):
        return 0.0
    given = text.removeprefix(prefix)
    return max(SequenceMatcher(None, given, answer.removeprefix(prefix)).ratio() for answer in _spellings(answers))


_ASK_LIST = 'Write "Final Answer:", and then a list in brackets with every item in quotes.'
SCORERS: dict[Scorer, AnswerCheck] = {
    "boxed": AnswerCheck(_boxed, "Please reason step by step, and put your final answer within \\boxed{}."),
    "number": AnswerCheck(_number, "Reason step by step. End with the number alone, on a line that begins with ####."),
    "choice": AnswerCheck(_choice, 'End with "The correct answer is (X)", where X is the letter of your choice.'),
    "exact": AnswerCheck(_exact),
    "contains": AnswerCheck(_contains),
    "coverage": AnswerCheck(_coverage),
    "f1": AnswerCheck(_f1),
    "list_f1": AnswerCheck(_list_f1, _ASK_LIST),
    "list_exact": AnswerCheck(_list_exact, _ASK_LIST),
    "rouge": AnswerCheck(_rouge),
    "ratio": AnswerCheck(_ratio),
}
