"""Answers to question sets: several per question, generated in batches, checked, and kept on disk as they come.

An answer is drawn with random numbers that belong to its question and its place among the answers, whatever else is
asked and however rows are batched. So an evaluation that was killed goes on with the answers on disk, to the same end.
"""

import dataclasses as dc
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sse_convert.checkpoints.identity import data_digest
from sse_convert.console import Bar
from sse_convert.errors import OutputError
from sse_convert.evaluation.intervals import Accuracy, best_of
from sse_convert.evaluation.questions import Question, QuestionSet
from sse_convert.evaluation.scorers import score
from sse_convert.inference.batch import continue_rows, end_tokens
from sse_convert.inference.sampling import Sampling
from sse_convert.recipe.schema import GenerationEval, SamplingEval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAPER = SamplingEval(samples=32, temperature=1.0, top_p=0.7)
"""avg@32 of arXiv:2507.16577, section 4.3"""

SLOTS_ON_CPU = 16384
CACHE_SHARE = 0.4
"""of the free memory of a GPU: a cache that grows is held twice for a moment"""


@dc.dataclass(frozen=True, slots=True)
class GenerationScore:
    """What one model earned on one set of questions."""

    task: str
    """name of the question file"""
    scorer: str
    """how answers were checked"""
    repeats: int
    """answers to each question"""
    mean: Accuracy
    """avg@n: mean score of the answers, over questions"""
    passes: tuple[tuple[int, Accuracy], ...]
    """pass@k: expected best score of k answers, over questions, for k = 1, 2, 4 ... and n"""
    tokens: float
    """mean length of an answer in tokens"""
    ended: float
    """share of the answers that the model ended itself, before `max_new_tokens`"""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: the setting, avg@n with its interval, and one entry per k."""
        return {
            "task": self.task,
            "scorer": self.scorer,
            "repeats": self.repeats,
            **self.mean.to_dict(),
            "passes": [{"k": tries, **share.to_dict()} for tries, share in self.passes],
            "tokens": self.tokens,
            "ended": self.ended,
        }


@dc.dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer."""

    text: str
    """without special tokens"""
    tokens: int
    """tokens generated, the end token included"""
    ended: bool
    """whether the model ended it"""


class AnswerFile:
    """Answers on disk, one JSON object per line, by what decides them.

    Args:
        path: file to add to; None keeps nothing.
        model: identity of the model and the type it computes in.

    Raises:
        OutputError: the file cannot be read.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self._path = path
        self._model = model
        text = "" if path is None or not path.exists() else _read(path)
        self._known = dict(_stored(text))
        self._torn = bool(text) and not text.endswith("\n")

    def key(self, question: Question, sampling: Sampling, seed: int) -> str:
        """What decides an answer, as a digest."""
        settings = (sampling.max_new_tokens, sampling.temperature, sampling.top_p)
        return data_digest([self._model, question.token_ids, settings, seed])

    def get(self, key: str) -> Answer | None:
        """The answer, if it is known."""
        return self._known.get(key)

    def add(self, answers: dict[str, Answer], about: dict[str, dict[str, Any]]) -> None:
        """Keep answers.

        Args:
            answers: by key.
            about: what a reader wants to know of each, by key.

        Raises:
            OutputError: the file cannot be written.
        """
        self._known |= answers
        if self._path is None:
            return
        lines = [json.dumps({**about[key], **dc.asdict(answer), "key": key}) + "\n" for key, answer in answers.items()]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(["\n"] * self._torn + lines)  # a line that a killed process left torn ends here
                self._torn = False
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error.strerror}", fix="free space") from error


def sampling_of(settings: GenerationEval) -> tuple[Sampling, int]:
    """How answers to the questions are drawn, and how many there are to each."""
    if settings.sampling == "greedy":
        return Sampling(max_new_tokens=settings.max_new_tokens), 1
    drawn = PAPER if settings.sampling == "paper" else settings.sampling
    assert isinstance(drawn, SamplingEval)
    chosen = Sampling(max_new_tokens=settings.max_new_tokens, temperature=drawn.temperature, top_p=drawn.top_p)
    return chosen, drawn.samples


def generation_score(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    asked: QuestionSet,
    settings: GenerationEval,
    *,
    seed: int,
    batch_slots: int,
    answers: AnswerFile,
    bar: Bar | None = None,
) -> GenerationScore:
    """Score one set of questions.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: the model's tokenizer.
        asked: from `read_questions`.
        settings: `eval.generation`.
        seed: of the random numbers.
        batch_slots: tokens of prompts and answers that are held at once, at least one row.
        answers: those that are known already; new ones are added.
        bar: advanced by one per answer.

    Raises:
        OutputError: answers cannot be kept.
    """
    sampling, repeats = sampling_of(settings)
    rows = [_Row(question, i, j, seed) for i, question in enumerate(asked.questions) for j in range(repeats)]
    keys = [answers.key(row.question, sampling, row.seed) for row in rows]
    missing = [(row, key) for row, key in zip(rows, keys, strict=True) if answers.get(key) is None]
    if bar is not None:
        bar.update(len(rows) - len(missing))
    missing.sort(key=lambda item: -len(item[0].question.token_ids))
    for batch in _batches(missing, sampling, batch_slots):
        new = _answered(model, tokenizer, [row for row, _ in batch], sampling)
        about = {key: {"task": asked.name, "question": row.number, "answer": row.repeat} for row, key in batch}
        answers.add(dict(zip((key for _, key in batch), new, strict=True)), about)
        if bar is not None:
            bar.update(len(batch))
    found = [answer for key in keys if (answer := answers.get(key)) is not None]
    pairs = [(answer.text, row.question) for answer, row in zip(found, rows, strict=True)]
    earned = [score(asked.scorer, text, question.answers) for text, question in pairs]
    return _total(asked, repeats, earned, found)


def slots_at_once(model: "PreTrainedModel", bytes_per_token: float) -> int:
    """Tokens of prompts and answers that fit a device beside the model: on a CPU a fixed number.

    Args:
        model: on its device.
        bytes_per_token: of the cache, for the longest rows that are asked for.
    """
    if model.device.type != "cuda":
        return SLOTS_ON_CPU
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(SLOTS_ON_CPU, int(CACHE_SHARE * free / bytes_per_token))


@dc.dataclass(frozen=True, slots=True)
class _Row:
    """One answer to be."""

    question: Question
    number: int
    """of the question, from 0"""
    repeat: int
    """which of its answers"""
    base: int

    @property
    def seed(self) -> int:
        """Of the answer: from the evaluation's seed, the prompt and the place among its answers."""
        text = f"{self.base} {self.repeat} {self.question.token_ids}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _batches(
    rows: Sequence[tuple[_Row, str]], sampling: Sampling, batch_slots: int
) -> Iterator[list[tuple[_Row, str]]]:
    """Neighbours of rows that are sorted longest first, as many at once as there is room for."""
    left = iter(rows)
    while first := next(left, None):
        batch = [first]
        longest = len(first[0].question.token_ids) + sampling.max_new_tokens
        batch += islice(left, max(1, batch_slots // longest) - 1)
        yield batch


def _answered(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: Sequence[_Row], sampling: Sampling
) -> list[Answer]:
    prompts = [row.question.token_ids for row in rows]
    new = continue_rows(model, prompts, sampling, [row.seed for row in rows])
    ends = end_tokens(model)
    texts = tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [Answer(str(text), len(ids), ids[-1] in ends) for text, ids in zip(texts, new, strict=True)]


def _total(asked: QuestionSet, repeats: int, earned: Sequence[float], found: Sequence[Answer]) -> GenerationScore:
    each = [earned[first : first + repeats] for first in range(0, len(earned), repeats)]
    tries = [k for k in (2**i for i in range(repeats.bit_length())) if k < repeats]
    return GenerationScore(
        task=asked.name,
        scorer=asked.scorer,
        repeats=repeats,
        mean=Accuracy(sum(earned) / repeats, len(each)),
        passes=tuple((k, Accuracy(sum(best_of(scores, k) for scores in each), len(each))) for k in (*tries, repeats)),
        tokens=sum(answer.tokens for answer in found) / len(found),
        ended=sum(answer.ended for answer in found) / len(found),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}", fix="make it readable") from error


def _stored(text: str) -> Iterator[tuple[str, Answer]]:
    """Answers of whole lines; what a killed process left of the last one is passed over."""
    for line in text.splitlines():
        try:
            stored = json.loads(line)
            yield str(stored["key"]), Answer(str(stored["text"]), int(stored["tokens"]), bool(stored["ended"]))
        except (ValueError, TypeError, KeyError):
            continue
