"""The text that a command looks at a model with: one file, cut into rows of equal length."""

import dataclasses as dc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sse_convert.data.documents import Document, Encoder
from sse_convert.data.text_files import check_text, missing
from sse_convert.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST = 128
"""tokens of a row at least: states of fewer say little"""
LENGTH = 2048
"""tokens per row where neither the user, the model nor the text asks for fewer"""
_CHARACTERS_PER_TOKEN = 16
"""text read per token wanted; tokenizers make more of it than one token"""
_COLUMNS = (".jsonl", ".parquet")


@dc.dataclass(frozen=True, slots=True)
class Text:
    """Rows of tokens, and the distinct tokens among them."""

    ids: Tensor
    """int64 [rows, length] token ids"""
    vocabulary: Tensor
    """int64 [U] distinct ids, ascending"""
    index: Tensor
    """int64 [rows, length] place of each id in `vocabulary`"""
    names: tuple[str, ...]
    """[U] what each id stands for"""

    @staticmethod
    def of(ids: Tensor, decode: Callable[[list[int]], str]) -> "Text":
        """The text of rows [rows, length] of token ids; `decode` gives the text of some ids."""
        vocabulary, index = torch.unique(ids, return_inverse=True)
        return Text(ids, vocabulary, index, tuple(str(decode([i])) for i in vocabulary.tolist()))

    def batches(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some rows at a time: their ids and places."""
        for first in range(0, len(self.ids), rows):
            yield self.ids[first : first + rows], self.index[first : first + rows]

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return self.ids.numel()


def check_file(path: Path) -> None:
    """Refuse what is no plain text file.

    Raises:
        DataError: the file is missing, empty, binary, not UTF-8, or holds text in columns.
    """
    if not path.is_file():
        raise DataError(f"{path} {missing(path)}", expected="a UTF-8 text file", fix="correct --text")
    if path.suffix in _COLUMNS:
        raise DataError(
            f"{path} holds its text in columns", expected="a UTF-8 text file", fix="write the column to a .txt file"
        )
    check_text(path)


def read_text(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    tokens: int,
    length: int | None = None,
    limit: int | None = None,
    vocab_size: int | None = None,
) -> Text:
    """The first tokens of a file, in rows; an incomplete last row is dropped.

    Args:
        path: UTF-8 text (see `check_file`), one document.
        tokenizer: the model's.
        tokens: to read at most.
        length: tokens per row; None for the smallest of `LENGTH`, `limit` and what the text has.
        limit: the model's context, None for no limit.
        vocab_size: rows of the model's embedding, to refuse a foreign tokenizer.

    Raises:
        UsageError: rows shorter than `LEAST`, longer than the context or than `tokens`.
        DataError: the text is shorter than one row, or its tokens are not the model's.
    """
    _check_sizes(tokens, length, limit)
    with path.open(encoding="utf-8") as file:
        document = Document(text=file.read(_CHARACTERS_PER_TOKEN * tokens), where=str(path), ends=False)
    ids = torch.from_numpy(Encoder(tokenizer, vocab_size).encode([document])[0].ids)[:tokens].long()
    row = length or min(LENGTH, limit or LENGTH, max(len(ids), LEAST))
    if len(ids) < row:
        shorter = f", or a --length of {LEAST} to {len(ids)}" if len(ids) >= LEAST else ""
        raise DataError(
            f"{path} has {len(ids)} tokens",
            expected=f"at least {row}" + (", the shortest row" if row == LEAST else ", one row"),
            fix=f"give a longer text{shorter}",
        )
    rows = len(ids) // row
    return Text.of(ids[: rows * row].view(rows, row), tokenizer.decode)


def _check_sizes(tokens: int, length: int | None, limit: int | None) -> None:
    if limit is not None and limit < LEAST:
        raise UsageError(f"the model's context is {limit} tokens", expected=f"at least {LEAST}")
    if tokens < (length or LEAST):
        raise UsageError(f"tokens is {tokens}", expected=f"at least one row ({length or LEAST})", fix="raise --tokens")
    if length is None:
        return
    bound = f" to {limit}, the model's context" if limit is not None else " or more"
    if length < LEAST or (limit is not None and length > limit):
        raise UsageError(f"length is {length}", expected=f"{LEAST}{bound}", fix="change --length")
