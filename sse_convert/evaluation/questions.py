"""Question sets from local files: one JSON object per line, in one format that takes the columns of published sets.

    question      text; also called problem, query_text, query, input                     AIME, MATH500, GSM8K
    answer        text, number, or a list; also answers, expected_answer, target           all
    choices       a list of texts, or choice_A, choice_B ... or options                    LongBench v2
    context       text                                                                     LongBench v2, NoLiMa
    prompt        the whole prompt in place of the others: text, or a list of messages     MRCR

Names are read without case. In a list of answers an element that is itself a list holds other spellings of one answer.
The answer of a choice is its letter, its index from 0, or its text.
"""

import dataclasses as dc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.data.documents import beginning_ids, check_letters, rendered
from sse_convert.data.needle import encode
from sse_convert.data.text_files import check_text
from sse_convert.data.watched_files import WatchedFiles
from sse_convert.errors import DataError
from sse_convert.evaluation.scorers import SCORERS
from sse_convert.recipe.problems import shortened
from sse_convert.recipe.ranges import expanded
from sse_convert.recipe.schema import GenerationEval, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {
    "question": ("question", "problem", "query_text", "query", "input"),
    "answer": ("answer", "answers", "expected_answer", "target"),
    "choices": ("choices", "options"),
    "context": ("context",),
    "prompt": ("prompt",),
}
"""field -> names of columns that may hold it, the first that is there counts"""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dc.dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    token_ids: tuple[int, ...]
    """the prompt"""
    answers: tuple[tuple[str, ...], ...]
    """right answers, each with other spellings"""


@dc.dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of one file."""

    name: str
    """of the file, without its ending"""
    scorer: Scorer
    """how answers are checked"""
    questions: tuple[Question, ...]
    """in the order of the file"""


def read_questions(
    settings: GenerationEval, tokenizer: "PreTrainedTokenizerBase", limit: int | None = None
) -> list[QuestionSet]:
    """The question sets of an evaluation, as prompts.

    Args:
        settings: `eval.generation`.
        tokenizer: of the models.
        limit: tokens that prompt and answer may have together.

    Raises:
        DataError: a file cannot be read, or a line cannot be used; names the line and its field.
    """
    if settings.template == "chat" and not tokenizer.chat_template:
        raise DataError(
            "eval.generation.template is chat, and the tokenizer has no chat template",
            expected="a tokenizer with a chat template",
            fix="use template: base",
        )
    most = None if limit is None else limit - settings.max_new_tokens
    return [
        QuestionSet(path.stem, scorer, tuple(_File(path, scorer, tokenizer, settings, most).questions()))
        for path, scorer in question_files(settings)
    ]


def question_files(settings: GenerationEval) -> Iterator[tuple[Path, Scorer]]:
    """The files of question sets, with their scorers."""
    return ((Path(expanded(path)), scorer) for path, scorer in settings.questions.items())


def file_digests(settings: GenerationEval) -> dict[str, str]:
    """What changes with the content of the question files, by file.

    Raises:
        DataError: a file does not exist.
    """
    return {str(path): WatchedFiles([path]).digest() for path, _ in question_files(settings) if _text_of(path)}


@dc.dataclass(frozen=True)
class _File:
    """Reads one file."""

    path: Path
    scorer: Scorer
    tokenizer: "PreTrainedTokenizerBase"
    settings: GenerationEval
    most: int | None
    """tokens of a prompt"""

    def questions(self) -> Iterator[Question]:
        records = list(_records(_text_of(self.path), self.path))
        if not records:
            raise DataError(f"{self.path} holds no questions", expected="one JSON object on each line")
        for number, record in records:
            yield _Line(self, number, {key.lower(): value for key, value in record.items()}).question()


@dc.dataclass(frozen=True)
class _Line:
    """Reads one line."""

    file: _File
    number: int
    """from 1"""
    record: Mapping[str, Any]
    """names in lower case"""

    @property
    def where(self) -> str:
        return f"{self.file.path}, line {self.number}"

    def question(self) -> Question:
        ids = self._ids(self._prompt())
        if self.file.most is not None and len(ids) > self.file.most:
            raise DataError(
                f"{self.where}: the prompt has {len(ids)} tokens, and "
                f"eval.generation.max_new_tokens asks for {self.file.settings.max_new_tokens} more",
                expected=f"at most {self.file.most} tokens of prompt in the model's context",
                fix="leave the question out, lower max_new_tokens, or train with a longer rope",
            )
        return Question(tuple(ids), self._answers())

    def _ids(self, prompt: str | list[dict[str, str]]) -> list[int]:
        tokenizer = self.file.tokenizer
        if self.file.settings.template == "base":
            if not isinstance(prompt, str):
                raise self._wrong("prompt", "a list of messages, and the template is base", "template: chat")
            check_letters(prompt, "prompt", self.where)
            return [*beginning_ids(tokenizer), *encode(tokenizer, prompt)]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = rendered(tokenizer, messages, self.where, prompt=True)
        check_letters(text, "prompt", self.where)
        return encode(tokenizer, text)

    def _prompt(self) -> str | list[dict[str, str]]:
        for name in ("context_file", "ctxs"):
            if self.record.get(name) is not None:
                raise self._wrong(name, "a file or a list of passages", "their text in the field context")
        prompt = self._value("prompt")
        if prompt is None:
            context = "" if self._value("context") is None else self._text("context")
            parts = [context, self._text("question"), self._choices(), SCORERS[self.file.scorer].ask]
            return "\n\n".join(part for part in parts if part)
        if isinstance(prompt, str) and prompt.strip():
            return _messages_in(prompt) or prompt
        if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
            return prompt
        raise self._wrong("prompt", shortened(repr(prompt)), "a text, or a list of messages {role, content}")

    def _options(self) -> list[str]:
        lettered = [self.record[name] for letter in LETTERS if (name := f"choice_{letter.lower()}") in self.record]
        found = self._value("choices") or lettered
        if isinstance(found, list) and len(found) <= len(LETTERS) and all(map(_spellings, found)):
            return list(map(str, found))
        raise self._wrong("choices", shortened(repr(found)), f"a list of at most {len(LETTERS)} texts")

    def _choices(self) -> str:
        return "\n".join(f"({letter}) {text}" for letter, text in zip(LETTERS, self._options(), strict=False))

    def _answers(self) -> tuple[tuple[str, ...], ...]:
        answer = self._required("answer")
        if self.file.scorer == "choice":
            return ((self._letter(answer),),)
        found = tuple(map(_spellings, answer if isinstance(answer, list) else [answer]))
        if found and all(found):
            return found
        raise self._wrong("answer", shortened(repr(answer)), "a text, a number, or a list of them")

    def _letter(self, answer: Any) -> str:
        """The letter of a choice that is given by letter, index or text."""
        options = self._options()
        letters = LETTERS[: len(options)] or LETTERS
        if type(answer) is int and 0 <= answer < len(options):
            return letters[answer]
        if isinstance(answer, str):
            if (bare := answer.strip(" ().").upper()) in tuple(letters):
                return bare
            if answer in options:
                return letters[options.index(answer)]
        raise self._wrong(
            "answer",
            shortened(repr(answer)),
            f"a letter from A to {letters[-1]}, an index from 0, or the text of a choice",
        )

    def _value(self, field: str) -> Any:
        """What a field holds, None where it is left out."""
        return next((self.record[name] for name in COLUMNS[field] if self.record.get(name) is not None), None)

    def _required(self, field: str) -> Any:
        if (value := self._value(field)) is not None:
            return value
        raise DataError(
            f"{self.where}: field {field!r} is missing",
            expected=f"one of the columns {', '.join(COLUMNS[field])}",
            fix=f"add it; the line has {', '.join(map(shortened, list(self.record)[:8])) or 'none'}",
        )

    def _text(self, field: str) -> str:
        value = self._required(field)
        if isinstance(value, str) and value.strip():
            return value
        raise self._wrong(field, shortened(repr(value)), "a text")

    def _wrong(self, field: str, found: str, expected: str) -> DataError:
        return DataError(f"{self.where}: field {field!r} is {found}", expected=expected, fix="correct the line")


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} does not exist", expected="a .jsonl file of questions", fix="correct the path")
    check_text(path)
    return path.read_text(encoding="utf-8-sig")


def _records(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl text with their lines, which line feeds alone end: JSON may hold other separators."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _object(line, f"{path}, line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(
            f"{where}: not JSON ({why})", expected="one JSON object on each line", fix="correct or remove the line"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}", expected="one JSON object on each line")
    return record


def _spellings(item: Any) -> tuple[str, ...]:
    """How one answer may be written; empty where it is none."""
    if isinstance(item, list):
        return tuple(text for text in item if isinstance(text, str) and text.strip())
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        return ()
    return (str(item),) if str(item).strip() else ()


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _messages_in(text: str) -> list[Any] | None:
    """The messages of a conversation that is written as JSON in a text, None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else None
