"""Question sets from local files: one JSON object per line, in one format that takes the columns of published sets.

    question      text; also called problem, query_text, query, input                     AIME, MATH500, LOFT, HELMET
    answer        text, number, or a list; also answers, expected_answer, target           all
    choices       a list of texts, or choice_A, choice_B ... or options                    LongBench v2
    context       text, or a list of passages {title, text}; also ctxs                     LongBench v2, HELMET, NoLiMa
    context_file  a text file or a .jsonl of passages, beside this file                    LOFT's corpora
    prompt        the whole prompt in place of the others: text, or a list of messages     MRCR
    prefix        what the answer must begin with; also random_string_to_prepend           MRCR

Names are read without case. In a list of answers an element that is itself a list holds other spellings of one answer;
numbers in it, LOFT's relevance, are left out. The answer of a choice is its letter, its index from 0, or its text.
"""

import dataclasses as dc
import json
import re
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
    "context": ("context", "ctxs"),
    "context_file": ("context_file",),
    "prompt": ("prompt",),
    "prefix": ("prefix", "random_string_to_prepend"),
}
"""field -> names of columns that may hold it, the first that is there counts"""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CONTEXT_FILE = re.compile(r'"context_file"\s*:\s*"([^"\\]+)"')
_TITLES, _TEXTS = ("title", "title_text"), ("text", "passage_text", "passage")


@dc.dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    token_ids: tuple[int, ...]
    """the prompt"""
    answers: tuple[tuple[str, ...], ...]
    """right answers, each with other spellings"""
    prefix: str = ""
    """what the answer must begin with"""


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
    """What changes with the content of the question files, and of the contexts that they name, by file.

    Raises:
        DataError: a file does not exist.
    """
    digests = {}
    for path, _ in question_files(settings):
        contexts = {path.parent / str(name) for name in _CONTEXT_FILE.findall(_text_of(path))}
        digests[str(path)] = WatchedFiles([path, *sorted(filter(Path.is_file, contexts))]).digest()
    return digests


@dc.dataclass(frozen=True)
class _File:
    """Reads one file."""

    path: Path
    scorer: Scorer
    tokenizer: "PreTrainedTokenizerBase"
    settings: GenerationEval
    most: int | None
    """tokens of a prompt"""
    contexts: dict[str, str] = dc.field(default_factory=dict)
    """files that questions share, by name"""

    def questions(self) -> Iterator[Question]:
        records = list(_records(_text_of(self.path), self.path))
        if not records:
            raise DataError(f"{self.path} holds no questions", expected="one JSON object on each line")
        for number, record in records:
            yield _Line(self, number, {key.lower(): value for key, value in record.items()}).question()

    def context(self, name: str, where: str) -> str:
        """A text that stands in a file of its own, read once."""
        if name not in self.contexts:
            self.contexts[name] = self._read_context(self.path.parent / name, where)
        return self.contexts[name]

    def _read_context(self, path: Path, where: str) -> str:
        if not path.is_file():
            raise DataError(f"{where}: field 'context_file' names {path}, which does not exist", expected="a file")
        text = _text_of(path)
        if path.suffix != ".jsonl":
            return text
        return _passages([record for _, record in _records(text, path)], str(path))


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
        prefix = "" if self._value("prefix") is None else self._text("prefix")
        return Question(tuple(ids), self._answers(), prefix)

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
        prompt = self._value("prompt")
        if prompt is None:
            parts = [self._context(), self._text("question"), self._choices(), SCORERS[self.file.scorer].ask]
            return "\n\n".join(part for part in parts if part)
        if isinstance(prompt, str) and prompt.strip():
            return _messages_in(prompt) or prompt
        if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
            return prompt
        raise self._wrong("prompt", shortened(repr(prompt)), "a text, or a list of messages {role, content}")

    def _context(self) -> str:
        if self._value("context_file") is not None:
            return self.file.context(self._text("context_file"), self.where)
        context = self._value("context")
        if isinstance(context, list):
            return _passages(context, f"{self.where}: field 'context'")
        return "" if context is None else self._text("context")

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


def _passages(passages: list[Any], where: str) -> str:
    """Numbered passages with their titles, as prompts with a corpus in them have them."""
    lines = []
    for i, passage in enumerate(passages):
        given = passage if isinstance(passage, dict) else {"text": passage}
        text = next((given[name] for name in _TEXTS if isinstance(given.get(name), str)), None)
        if text is None:
            raise DataError(f"{where}: passage {i + 1} has no text", expected=f"one of {', '.join(_TEXTS)}")
        title = next((f"TITLE: {given[name]} | " for name in _TITLES if given.get(name)), "")
        lines.append(f"ID: {given.get('pid', i)} | {title}CONTENT: {text}")
    return "\n".join(lines)


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
