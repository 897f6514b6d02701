"""RULER texts as rows of tokens: the haystack is as long as the asked context length allows.

As published: prompt, chat template and the beginning of the answer, counted in tokens of the model's own tokenizer
without special tokens around them, plus 128 tokens to generate, fill at most the context length. The size of the
haystack is searched once per task and length (bisection, one random example per probe); an example that comes out too
long is drawn again with a smaller haystack. Steps are 500 words, or 25 lines (5 below 4096 tokens); as 500 words do not
fit short contexts, which the published settings never have, running text goes in steps of 50 words below 4096 tokens.
"""

import dataclasses as dc
import random
from typing import TYPE_CHECKING

from sse_convert.data.documents import beginning_ids, rendered
from sse_convert.data.needle import encode
from sse_convert.errors import DataError
from sse_convert.evaluation.ruler import RULER_TASKS, Material, RulerTask, RulerText, make_text, more_values
from sse_convert.recipe.schema import RulerEval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEW_TOKENS = 128
"""tokens of an answer"""
WRONG_VALUES = 9
"""values that the right ones are compared with where nothing is generated"""
SHORT = 4096
"""contexts of fewer tokens take smaller steps"""
_REDRAWS = 20


@dc.dataclass(frozen=True, slots=True)
class RulerSample:
    """One question to a model."""

    task: str
    """task name"""
    length: int
    """context length in tokens, the answer included"""
    depth: float | None
    """share of the haystack before the asked needle, None where several are asked for"""
    token_ids: tuple[int, ...]
    """the prompt"""
    answers: tuple[str, ...]
    """what must be in the generated text"""
    right: tuple[tuple[int, ...], ...]
    """token ids of each answer as the prompt's continuation"""
    wrong: tuple[tuple[int, ...], ...]
    """token ids of values that are no answer, those of the text first"""


def ruler_samples(
    settings: RulerEval, tokenizer: "PreTrainedTokenizerBase", material: Material, seed: int = 0
) -> list[list[RulerSample]]:
    """The samples of an evaluation: one list per length and task.

    Each list depends on its own setting, the text, the tokenizer and the seed alone.

    Raises:
        DataError: a task does not fit a length, or the tokenizer has no chat template.
    """
    if settings.template == "chat" and not tokenizer.chat_template:
        raise DataError(
            "eval.ruler.template is chat, and the tokenizer has no chat template",
            expected="a tokenizer with a chat template",
            fix="use template: base",
        )
    groups = []
    for length in settings.lengths:
        for name in settings.tasks:
            rng = random.Random(f"{seed} {length} {name}")
            maker = _Maker(name, length, rng, material, tokenizer, settings.template == "chat")
            size = maker.largest()
            groups.append([maker.sample(size) for _ in range(settings.samples)])
    return groups


@dc.dataclass(frozen=True, slots=True)
class _Maker:
    """Makes samples of one task and length."""

    name: str
    length: int
    rng: random.Random
    material: Material
    tokenizer: "PreTrainedTokenizerBase"
    chat: bool

    @property
    def task(self) -> RulerTask:
        return RULER_TASKS[self.name]

    @property
    def step(self) -> int:
        """Words or lines by which a haystack grows and shrinks."""
        if self.task.haystack == "essay":
            return 500 if self.length >= SHORT else 50
        return 25 if self.length >= SHORT else 5

    def largest(self) -> int:
        """The largest haystack found to fit, at least one step: up to three times what the size of a step suggests."""
        tokens = len(self._prompt(self._text(self.step)))
        low, high, best = self.step, max(3 * self.length * self.step // tokens, 2 * self.step), self.step
        while low <= high:
            middle = (low + high) // 2
            if self._fits(self._text(middle)):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def sample(self, size: int) -> RulerSample:
        """One sample with a haystack of this size, or of a smaller one where that comes out too long."""
        text = self._fitting(size)
        wrong = more_values(self.rng, self.task, text, WRONG_VALUES, self.material)
        beginning = [] if self.chat else beginning_ids(self.tokenizer)  # a template writes its special tokens itself
        return RulerSample(
            task=self.name,
            length=self.length,
            depth=text.depth,
            token_ids=(*beginning, *self._prompt(text)),
            answers=text.answers,
            right=tuple(self._value(text, value) for value in text.answers),
            wrong=tuple(self._value(text, value) for value in wrong),
        )

    def _text(self, size: int) -> RulerText:
        return make_text(self.rng, self.task, size, self.material)

    def _fitting(self, size: int) -> RulerText:
        for _ in range(_REDRAWS + size // self.step):
            text = self._text(size)
            if self._fits(text):
                return text
            size = size - self.step if size > self.step else size
        needed = len(self._prompt(text)) + NEW_TOKENS
        raise DataError(
            f"{self.name} does not fit {self.length} tokens: its prompt takes {needed - NEW_TOKENS}, "
            f"the answer {NEW_TOKENS}",
            expected=f"{needed} tokens or more",
            fix="raise eval.ruler.lengths, or leave the task out of eval.ruler.tasks",
        )

    def _fits(self, text: RulerText) -> bool:
        return len(self._prompt(text)) + NEW_TOKENS <= self.length

    def _prompt(self, text: RulerText) -> list[int]:
        """Token ids of the question and the beginning of its answer, without special tokens around them."""
        question = text.question
        if self.chat:
            messages = [{"role": "user", "content": question}]
            question = rendered(self.tokenizer, messages, "eval.ruler", prompt=True)
        return encode(self.tokenizer, question + text.lead)

    def _value(self, text: RulerText, value: str) -> tuple[int, ...]:
        """Token ids of a value after the beginning of the answer."""
        lead, both = encode(self.tokenizer, text.lead), encode(self.tokenizer, f"{text.lead} {value}")
        return tuple(both[len(lead) :] if both[: len(lead)] == lead else encode(self.tokenizer, f" {value}"))
