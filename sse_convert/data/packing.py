"""Rows of equal length from a source's documents, in an order that a seed fixes, continued from any position.

T tokens per row. A document that does not fit goes on in the next row, where its positions start at 0 again.
"""

import dataclasses as dc
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sse_convert.data.documents import Document, Encoded, Encoder, Ids, Mask
from sse_convert.errors import DataError

IGNORED = -100
ENCODED_AT_ONCE = 1 << 18
"""characters of text that are tokenized together"""


class Corpus(Protocol):
    """Documents in units that can be read in any order."""

    @property
    def units(self) -> int | None:
        """Number of units; None when unknown (a stream: read in order until a unit is empty)."""
        ...

    def read(self, unit: int) -> list[Document]:
        """The documents of a unit."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON-ready data that changes when the text does."""
        ...


@dc.dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next token of a source is found."""

    epoch: int = 0
    """passes completed"""
    place: int = 0
    """position in this pass's order of units"""
    document: int = 0
    """position in this unit's order of documents"""
    token: int = 0
    """tokens of that document already used"""


@dc.dataclass(frozen=True, slots=True)
class Packed:
    """One row of tokens."""

    ids: Ids
    """[T]"""
    positions: npt.NDArray[np.int32]
    """[T] position in the document, 0 at its first token and at the start of the row"""
    assistant: Mask
    """[T] tokens that count in a loss on assistant turns"""


class Packer:
    """Rows from one corpus.

    Args:
        corpus: the documents.
        encoder: makes tokens of them.
        seq_len: tokens per row (T).
        seed: numbers that fix the order of units and documents; None keeps the corpus's order.
        passes: how often the corpus is read; None for ever.
        cursor: where to start.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        seq_len: int,
        *,
        seed: tuple[int, ...] | None,
        passes: int | None,
        cursor: Cursor,
    ) -> None:
        self.cursor = cursor
        self._corpus, self._encoder, self._seq_len = corpus, encoder, seq_len
        self._seed, self._passes = seed, passes
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._ready: dict[tuple[int, int], list[Encoded]] = {}
        self._found_text = cursor != Cursor()

    def row(self) -> Packed | None:
        """The next row; None when the last pass is over (an incomplete last row is dropped).

        Raises:
            DataError: a whole pass over the corpus found no token, or a document cannot be read.
        """
        T = self._seq_len
        ids = np.empty(T, dtype=np.int32)
        positions = np.empty(T, dtype=np.int32)
        assistant = np.empty(T, dtype=np.bool_)
        filled = 0
        while filled < T:
            document = self._current()
            if document is None:
                return None
            start = self.cursor.token
            count = min(T - filled, len(document.ids) - start)
            part = slice(filled, filled + count)
            ids[part] = document.ids[start : start + count]
            assistant[part] = document.assistant[start : start + count]
            positions[part] = np.arange(count)
            filled += count
            self._found_text = True
            self.cursor = dc.replace(self.cursor, token=start + count)
        return Packed(ids, positions, assistant)

    def _current(self) -> Encoded | None:
        """The document the cursor stands in, moving it on to the next one with tokens left; None at the end."""
        while self._passes is None or self.cursor.epoch < self._passes:
            documents = self._documents()
            if documents is None:
                self._next_pass()
            elif self.cursor.document >= len(documents):
                self.cursor = Cursor(self.cursor.epoch, self.cursor.place + 1)
            elif self.cursor.token >= len(documents[self.cursor.document].ids):
                self.cursor = Cursor(self.cursor.epoch, self.cursor.place, self.cursor.document + 1)
            else:
                return documents[self.cursor.document]
        return None

    def _next_pass(self) -> None:
        if not self._found_text:
            raise DataError("the text has no documents", expected="at least one that is not blank", fix="add text")
        self.cursor = Cursor(self.cursor.epoch + 1)

    def _documents(self) -> list[Encoded] | None:
        """The tokens of the unit at the cursor, in this pass's order; None behind the last unit."""
        here = self.cursor.epoch, self.cursor.place
        if here not in self._ready:
            self._ready = self._encoded(*here)
        return self._ready.get(here)

    def _encoded(self, epoch: int, place: int) -> dict[tuple[int, int], list[Encoded]]:
        """The unit at a place, and ones after it if it is small: a tokenizer runs over many texts in parallel."""
        units: dict[tuple[int, int], list[Document]] = {}
        size = 0
        while size < ENCODED_AT_ONCE and (documents := self._read(epoch, place)) is not None:
            units[epoch, place] = documents
            size += sum(1000 if document.text is None else len(document.text) for document in documents)
            place += 1
            if self._corpus.units is None:
                break  # reading ahead in a stream would have to be undone after a restart
        encoded = iter(self._encoder.encode([document for documents in units.values() for document in documents]))
        return {key: [next(encoded) for _ in documents] for key, documents in units.items()}

    def _read(self, epoch: int, place: int) -> list[Document] | None:
        unit = self._unit_at(epoch, place)
        if unit is None:
            return None
        documents = self._corpus.read(unit)
        if not documents and self._corpus.units is None:
            return None
        documents = [document for document in documents if document.text is None or document.text.strip()]
        if self._seed is not None and len(documents) > 1:
            order = np.random.default_rng([*self._seed, epoch, unit]).permutation(len(documents))
            documents = [documents[i] for i in order]
        return documents

    def _unit_at(self, epoch: int, place: int) -> int | None:
        units = self._corpus.units
        if units is None:
            return place
        if place >= units:
            return None
        if self._seed is None:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([*self._seed, epoch]).permutation(units))
        return int(self._order[1][place])


def packed_rows(packer: Packer) -> Iterator[Packed]:
    """The packer's rows until its last pass is over."""
    while (row := packer.row()) is not None:
        yield row
