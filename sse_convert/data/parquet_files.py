"""Documents of parquet files, read by batches: a row group may hold more text than memory, and 1 KB on disk may say it.

Values that a file stores once and names often (dictionary encoding) are one object each, however many rows have them.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.foreign import MOST_WORDS
from sse_convert.data.documents import Document, document_from_record
from sse_convert.data.text_files import LARGEST_RECORD, fingerprint, too_large
from sse_convert.data.watched_files import WatchedFiles
from sse_convert.errors import DataError
from sse_convert.process_memory import memory_for
from sse_convert.recipe.problems import shortened

UNIT_BYTES = 32 << 20
"""encoded bytes of a unit; a larger row group is several units"""
_BATCH_BYTES = 4 << 20
_MOST_UNITS = 1 << 16
"""of a row group; a damaged file may tell any size"""
_MOST_ROWS = 4096
"""of a batch"""
_BUFFER = 1 << 20
"""bytes of a file that are read at a time"""


class ParquetFiles:
    """Documents of parquet files. A unit is a row group, or some neighbouring rows of a large one.

    Args:
        files: the files.
        field: column that holds the text (or the messages).
        chat: rows hold conversations.

    Raises:
        DataError: a file is damaged, has no rows or lacks the column.
    """

    def __init__(self, files: list[Path], *, field: str, chat: bool) -> None:
        self._files = files
        self._field = field
        self._chat = chat
        self._watched = WatchedFiles(files)
        self._leaves: list[list[int]] = []
        self._units: list[tuple[int, int, int, int]] = []
        for i, path in enumerate(files):
            with _reading(str(path)):
                self._find_units(i, path)

    def _find_units(self, i: int, path: Path) -> None:
        """Note the units of a file: file, row group, first row, row behind the last."""
        file = _open(path)
        names = file.schema_arrow.names
        if self._field not in names:
            raise DataError(
                f"{path}: no column {self._field!r}",
                expected=f"one of {sorted(names)}",
                fix="name the column with `field` in the source",
            )
        if file.metadata.num_rows == 0:
            raise DataError(f"{path} has no rows", expected="rows of text", fix="remove the file")
        self._leaves.append(_leaves(file, self._field))
        for group in range(file.num_row_groups):
            rows, size = file.metadata.row_group(group).num_rows, self._size(i, file, group)
            step = max(1, rows // min(-(-size // UNIT_BYTES), _MOST_UNITS))
            self._units += [(i, group, start, min(start + step, rows)) for start in range(0, rows, step)]

    def _size(self, i: int, file: Any, group: int) -> int:
        """Encoded bytes of the column in a row group."""
        columns = file.metadata.row_group(group)
        return max(1, sum(int(columns.column(leaf).total_uncompressed_size) for leaf in self._leaves[i]))

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self._units)

    def fingerprint(self) -> dict[str, Any]:
        """Names, number, size and content of the files."""
        return fingerprint(self._files, self._watched)

    def read(self, unit: int) -> list[Document]:
        """The documents of a unit, in file order.

        Raises:
            DataError: a value is too large or not text (or not a conversation), or the file has changed.
        """
        index, group, start, stop = self._units[unit]
        path = self._files[index]
        where = f"{path}, row group {group}"
        self._watched.check(index)
        with _reading(where):
            values = list(self._values(index, group, start, stop))
        self._watched.check(index)
        return [self._document(value, f"{where}, row {row}") for row, value in enumerate(values, start)]

    def _document(self, value: Any, where: str) -> Document:
        document = document_from_record({self._field: value}, self._field, chat=self._chat, where=where)
        if document.characters > LARGEST_RECORD:
            raise too_large(f"{where}: the value", document.characters)
        return document

    def _values(self, index: int, group: int, start: int, stop: int) -> Iterator[Any]:
        """The values of some rows of a row group."""
        path = self._files[index]
        file = _open(path, _names(_open(path), self._leaves[index]))
        rows = file.metadata.row_group(group).num_rows
        batch_rows = max(1, min(_MOST_ROWS, rows * _BATCH_BYTES // self._size(index, file, group)))
        first, known = 0, dict[str, str]()
        for batch in file.iter_batches(batch_rows, [group], [self._field], use_threads=False):
            if first >= stop:
                return
            column, skipped = batch.column(0), max(start - first, 0)
            yield from _python(column[skipped : stop - first], known)
            first += len(column)


def parquet_columns(path: Path) -> dict[str, bool]:
    """Columns of a file, and whether each holds text.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow as pa

    with _reading(str(path)):
        schema = _open(path).schema_arrow
    return {field.name: pa.types.is_string(field.type) or pa.types.is_large_string(field.type) for field in schema}


def _open(path: Path, dictionaries: list[str] | None = None) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, read_dictionary=dictionaries, pre_buffer=False, buffer_size=_BUFFER)


def _leaves(file: Any, field: str) -> list[int]:
    """Numbers of the stored columns that a field is made of."""
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    return [i for i, path in enumerate(paths) if path == field or path.startswith(f"{field}.")]


def _names(file: Any, leaves: list[int]) -> list[str]:
    """Those of them that hold text, by path."""
    columns = map(file.schema.column, leaves)
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _python(array: Any, known: dict[str, str]) -> list[Any]:
    """An array as Python objects, in which equal texts are one; `known` holds them."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        codes = array.indices.to_pylist()
        new = ((code, array.dictionary[code].as_py()) for code in set(codes) if code is not None)
        texts = {code: known.setdefault(text, text) for code, text in new}
        return [texts.get(code) for code in codes]
    if pa.types.is_struct(array.type):
        rows = zip(*(_python(part, known) for part in array.flatten()), strict=True)
        names, valid = [field.name for field in array.type], array.is_valid().to_pylist()
        return [dict(zip(names, row, strict=True)) if is_set else None for is_set, row in zip(valid, rows, strict=True)]
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        items, sizes = iter(_python(array.flatten(), known)), array.value_lengths().to_pylist()
        return [None if size is None else list(islice(items, size)) for size in sizes]
    values: list[Any] = array.to_pylist()
    return values


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn what pyarrow raises for damaged bytes into an error with their place.

    Raises:
        DataError: they are not what parquet says they are.
        HardwareError: there is too little memory.
    """
    import pyarrow as pa

    try:
        with memory_for(f"reading {where}"):
            yield
    except (pa.ArrowException, OSError, UnicodeError, KeyError, OverflowError) as error:
        raise DataError(
            f"{where} is damaged: {shortened(str(error), MOST_WORDS)}",
            expected="a parquet file",
            fix="fetch the file again",
        ) from error
