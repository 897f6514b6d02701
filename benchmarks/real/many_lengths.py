"""An experiment: rows with planted facts hold documents of many lengths. The package plants one as long as the row.

In rows of 8K tokens 0.7% of the package's answers stand in the first 1K, and 87% behind the first 4K. A state that was
trained long on them finds fewer needles in rows of 1K than of 8K. `levers.py --many-lengths` trains on these instead.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from sse_convert.data import rows
from sse_convert.data.packing import Packed
from sse_convert.data.recall_rows import recall_row
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Needles

SHORTEST = 512
"""tokens of a document"""


def halved(rng: random.Random, length: int) -> list[int]:
    """Lengths of documents that fill a row: it stays whole, or each half of it is halved in the same way."""
    if length < 2 * SHORTEST or rng.random() < 0.5:
        return [length]
    half = length // 2
    return halved(rng, half) + halved(rng, length - half)


def plant(reader: Any, packed: Packed, needles: Needles, seed: int) -> tuple[Packed, Any]:
    """Stands for `RowReader._plant`: documents with facts of their own, and where the row tells the next token."""
    rng, start = random.Random(seed), 0
    ids, positions = packed.ids.copy(), packed.positions.copy()
    counts, known = packed.assistant.copy(), np.zeros(len(ids), dtype=np.bool_)
    for length in halved(rng, len(ids)):
        here = slice(start, start + length)
        start += length
        try:
            made = recall_row(rng, packed.ids[here].tolist(), length, needles, reader._tokenizer, reader._words)
        except DataError:  # too short for what was drawn
            positions[here.start] = 0
            continue
        ids[here], positions[here], counts[here] = made.token_ids, np.arange(length), True
        known[here] = made.answers
    return Packed(ids, positions, counts), known


@contextlib.contextmanager
def many_lengths() -> Iterator[None]:
    """In this block readers plant so."""
    with mock.patch.object(rows.RowReader, "_plant", plant):
        yield
