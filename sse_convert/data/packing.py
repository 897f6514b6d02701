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
        self._units: dict[tuple[int, int], list[Document] | None] = {}
        self._ready: dict[tuple[int, ...], Encoded] = {}
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
            epoch, place, number = self.cursor.epoch, self.cursor.place, self.cursor.document
            documents = self._documents(epoch, place)
            if documents is None:
                self._next_pass()
            elif number >= len(documents):
                self.cursor = Cursor(epoch, place + 1)
            elif self.cursor.token >= len((found := self._encoded(epoch, place, number)).ids):
                self.cursor = Cursor(epoch, place, number + 1)
            else:
                return found
        return None

    def _next_pass(self) -> None:
        if not self._found_text:
            raise DataError("the text has no documents", expected="at least one that is not blank", fix="add text")
        self.cursor = Cursor(self.cursor.epoch + 1)

    def _documents(self, epoch: int, place: int) -> list[Document] | None:
        """The documents of the unit at a place, in this pass's order; None behind the last unit."""
        if (epoch, place) not in self._units:
            here = self.cursor.epoch, self.cursor.place
            self._units = {key: documents for key, documents in self._units.items() if key >= here}
            self._units[epoch, place] = self._read(epoch, place)
        return self._units[epoch, place]

    def _encoded(self, *here: int) -> Encoded:
        """The tokens of a document, by pass, place and number; with those after it, which a tokenizer makes in
        parallel."""
        if here not in self._ready:
            keys, documents, size = [], [], 0
            for key, document in self._from(*here):
                keys.append(key)
                documents.append(document)
                size += document.characters
                if size >= ENCODED_AT_ONCE:
                    break
            self._ready = dict(zip(keys, self._encoder.encode(documents), strict=True))
        return self._ready[here]

    def _from(self, epoch: int, place: int, number: int) -> Iterator[tuple[tuple[int, ...], Document]]:
        """This document and those after it in its pass; of a stream, those of its unit alone: reading ahead would have
        to be undone after a restart."""
        while (documents := self._documents(epoch, place)) is not None:
            for i in range(number, len(documents)):
                yield (epoch, place, i), documents[i]
            if self._corpus.units is None:
                return
            place, number = place + 1, 0

    def _read(self, epoch: int, place: int) -> list[Document] | None:
        unit = self._unit_at(epoch, place)
        if unit is None:
            return None
        documents = self._corpus.read(unit)
        if not documents and self._corpus.units is None:
            return None
        documents = [document for document in documents if document.text is None or not _is_blank(document.text)]
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


def _is_blank(text: str) -> bool:
    return not text or text.isspace()
