"""A document, and how it becomes tokens: special tokens at its ends, and which tokens a chat document is trained on."""

import dataclasses as dc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sse_convert.data.tokens import token_ids
from sse_convert.errors import DataError
from sse_convert.recipe.problems import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_PIECE = 1 << 20
"""characters of a text that are tokenized as one; a tokenizer takes some fifty bytes of memory for each"""
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, a conversation or ready tokens. Exactly one of the three is set."""

    text: str | None = None
    """plain text"""
    messages: list[dict[str, Any]] | None = None
    """chat messages with `role` and `content`"""
    ids: Ids | None = None
    """tokens, special tokens included"""
    begins: bool = True
    """false when the text continues a document that was cut before it"""
    ends: bool = True
    """false when the document goes on after this text"""
    where: str = ""
    """file and offset, for error messages"""

    @property
    def characters(self) -> int:
        """Length of its text; of tokens, about."""
        if self.messages is not None:
            return sum(len(str(part)) for message in self.messages for part in message.values())
        return 4 * len(self.ids) if self.ids is not None else len(self.text or "")


@dc.dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a document and whether each counts in a loss on assistant turns."""

    ids: Ids
    """[L]"""
    assistant: Mask
    """[L]; all true for plain text"""


class Encoder:
    """Documents to tokens, with the tokenizer's beginning-of-sequence token before and its end token behind.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: the tokenizer has tokens the model does not know.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None) -> None:
        added = tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special}  # Gemma 3's text models have one they cannot embed
        highest = max((i for i in tokenizer.get_vocab().values() if i not in special), default=-1)
        if vocab_size is not None and highest >= vocab_size:
            raise DataError(
                f"the tokenizer's highest token id is {highest}, the model embeds {vocab_size} tokens",
                expected=f"token ids below {vocab_size}",
                fix="use the tokenizer that belongs to the model",
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._prefix = beginning_ids(tokenizer)
        self._suffix = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Tokens of each document; texts are tokenized together, which a fast tokenizer does in parallel.

        Raises:
            DataError: a conversation does not fit the chat template.
        """
        texts = [document.text for document in documents if document.text is not None]
        short = iter(token_ids(self._tokenizer, [text for text in texts if len(text) <= LONGEST_PIECE]))
        plain = (next(short) if len(text) <= LONGEST_PIECE else self._long(text) for text in texts)
        return [self._encoded(document, next(plain) if document.text is not None else []) for document in documents]

    def _long(self, text: str) -> Ids:
        """Tokens of a long text, made of one piece after the other."""
        parts = (token_ids(self._tokenizer, [piece])[0] for piece in _pieces(text))
        return np.concatenate([np.array(part, dtype=np.int32) for part in parts])

    def _encoded(self, document: Document, text_ids: list[int] | Ids) -> Encoded:
        if document.messages is not None:
            return self._conversation(document.messages, document.where)
        if document.ids is not None:
            ids = document.ids
        else:
            prefix = self._prefix if document.begins else []
            suffix = self._suffix if document.ends else []
            ids = np.concatenate([prefix, text_ids, suffix]).astype(np.int32)
        if self._vocab_size is not None and len(ids) and (highest := int(ids.max())) >= self._vocab_size:
            raise DataError(
                f"{document.where}: the text holds a special token (id {highest}) that the model does not embed",
                expected=f"token ids below {self._vocab_size}",
                fix="remove the token from the text",
            )
        return Encoded(ids, np.ones(len(ids), dtype=np.bool_))

    def _conversation(self, messages: list[dict[str, Any]], where: str) -> Encoded:
        """Tokens of a conversation; `assistant` marks what the model itself would write, its end-of-turn included.

        A turn is what the template adds between the prompt for it and the conversation with it, so any template works
        that only ever appends.
        """
        whole = self._render(messages, where, prompt=False)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:i], where, prompt=True) if i else ""
                so_far = self._render(messages[: i + 1], where, prompt=False)
                if not (whole.startswith(prompt) and whole.startswith(so_far)):
                    raise DataError(
                        f"{where}: the chat template rewrites earlier turns, so assistant turn {i} cannot be found",
                        expected="a template that only appends",
                        fix="keep one assistant turn per conversation, or train with loss_mask: all on rendered text",
                    )
                spans.append((len(prompt), len(so_far)))
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        assistant = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            assistant |= (starts >= start) & (starts < stop)
        return Encoded(ids, assistant)

    def _render(self, messages: list[dict[str, Any]], where: str, *, prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, but a source is `kind: chat`",
                expected="a tokenizer with a chat template",
                fix="convert an instruction-tuned model, or add a chat_template.jinja to the model's folder",
            )
        return rendered(self._tokenizer, messages, where, prompt=prompt)


def rendered(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], where: str, *, prompt: bool
) -> str:
    """A conversation in the tokenizer's chat template.

    Args:
        tokenizer: has a chat template.
        messages: of the conversation.
        where: they come from, for errors.
        prompt: whether the beginning of the model's next turn follows.

    Raises:
        DataError: the template refuses them.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program: it fails in any way, on content that it did not expect
        raise DataError(
            f"{where}: the chat template refuses the conversation: {shortened(str(error))}",
            expected="a template that can be rendered, and roles in the order it wants",
            fix="mend this conversation, or chat_template.jinja in the model's folder",
        ) from error


def document_from_record(record: dict[str, Any], field: str, *, chat: bool, where: str) -> Document:
    """The document a jsonl line, parquet row or hub example holds.

    Raises:
        DataError: the column is missing or is not text (or not a list of messages).
    """
    if field not in record:
        raise DataError(
            f"{where}: no column {field!r}",
            expected=f"one of {sorted(record)}" if record else "a record with columns",
            fix="rename the column" if chat else "name the column with `field` in the source",
        )
    value = record[field]
    if not chat:
        if not isinstance(value, str):
            raise DataError(f"{where}: column {field!r} is {type(value).__name__}, not text", expected="a string")
        check_letters(value, field, where)
        return Document(text=value, where=where)
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise DataError(
            f"{where}: column {field!r} is not a conversation",
            expected='a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    for message in value:
        for part in message.values():
            check_letters(part, field, where)
    return Document(messages=[dict(message) for message in value], where=where)


def _pieces(text: str) -> Iterator[str]:
    """A text, cut where it is long, before a space if there is one nearby: tokens of most kinds begin there."""
    start = 0
    while len(text) - start > LONGEST_PIECE:
        end = start + LONGEST_PIECE
        end = max(text.rfind(" ", end - LONGEST_PIECE // 2, end), 0) or end
        yield text[start:end]
        start = end
    yield text[start:]


def check_letters(value: object, field: str, where: str) -> None:
    """Make sure that a text can be written as UTF-8: JSON can spell halves of characters, which no tokenizer reads."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: column {field!r} has half a character at position {error.start}",
            expected="text of whole characters",
            fix="remove the lone surrogate (\\ud800 to \\udfff)",
        ) from error


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def beginning_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The beginning-of-sequence token where the tokenizer puts one before any text, else nothing."""
    first = list(tokenizer("")["input_ids"])[:1]
    return first if first == [tokenizer.bos_token_id] else []
