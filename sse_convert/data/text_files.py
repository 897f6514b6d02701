"""Local text: which files a source names, checks that they are text, and random access to their documents.

Files are read through in full once, when they are opened, so that a bad byte is found before training starts and not
days later. What is kept is where units begin and end; text is read again when its turn comes.
"""

import codecs
import contextlib
import dataclasses as dc
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.identity import SEAL
from sse_convert.data.documents import Document, document_from_record
from sse_convert.data.watched_files import FileBytes, WatchedFiles, changed
from sse_convert.errors import DataError
from sse_convert.process_memory import memory_for
from sse_convert.report import counted, format_bytes

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
CODE_SUFFIXES = (
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".jsx", ".kt", ".lua"),
    *(".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx"),
)
"""source code, which a folder is read for as well"""
OTHER_FORMATS = (
    ".json",
    ".csv",
    ".tsv",
    ".arrow",
    ".feather",
    ".xml",
    ".html",
    ".pdf",
    ".gz",
    ".zip",
    ".zst",
    ".bz2",
    ".xz",
)
"""files that are not running text, whatever their bytes: they are refused, not read as if they were"""
BYTES_PER_TOKEN = 4
"""of typical English text; only decides how finely long documents are cut"""
UNIT_ROWS = 4
"""a unit holds about this many rows, so that neighbouring rows come from different documents"""
SMALLEST_UNIT_BYTES = 2048
LARGEST_RECORD = 64 << 20
"""bytes of a line of .jsonl, or of a value of .parquet"""
_KINDS = 4
"""of files that are not read, as a line names them"""
_BLOCK = 8 << 20
_LOOK_AHEAD = 4096
_BOM = codecs.BOM_UTF8


def unit_bytes(seq_len: int) -> int:
    """Bytes of a unit for rows of `seq_len` tokens."""
    return max(SMALLEST_UNIT_BYTES, UNIT_ROWS * BYTES_PER_TOKEN * seq_len)


def find_files(path: Path) -> list[Path]:
    """The file itself, or the text and source files of a folder and its subfolders in name order; `~` is the user's own
    folder. Hidden files and folders inside it are left out, and source files that are empty.

    Raises:
        DataError: the path does not exist, the folder has no file of a known kind, or a file is empty.
    """
    files = _named(path.expanduser())
    for file in files:
        with contextlib.suppress(OSError):  # reading it will say why
            if file.stat().st_size == 0:
                raise _empty(file)
    return files


def _named(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix.lower() in OTHER_FORMATS:
            raise DataError(
                f"{path} is a {path.suffix} file, not running text",
                expected=f"a file ending in {', '.join(SUFFIXES)}, or any other plain text",
                fix="store its records as .jsonl, one object per line; or as .txt, to train on its raw text",
            )
        return [path]
    if not path.is_dir():
        raise DataError(
            f"{path} {missing(path)}",
            expected="a file or a folder",
            fix="correct the source's path, which starts at the folder that the command runs in",
        )
    files = [file for file in _inside(path) if _is_read(file)]
    if not files:
        raise DataError(
            f"{path} holds no text",
            expected=f"files ending in {', '.join(SUFFIXES)}, or source code",
            fix="add text or correct the path",
        )
    return files


def _inside(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders in name order, without hidden ones."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # an environment is not even looked into
        found += [Path(here, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _is_read(file: Path) -> bool:
    return file.suffix in SUFFIXES or (file.suffix.lower() in CODE_SUFFIXES and file.stat().st_size > 0)


def passed_over(path: Path) -> list[str]:
    """A line on the files of a folder that are not read, by how they end; none where all are."""
    files = _inside(path.expanduser()) if path.expanduser().is_dir() else []
    kinds = Counter(file.suffix or file.name for file in files if not _is_read(file) and file.stat().st_size > 0)
    if not kinds:
        return []
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_KINDS))
    more = f" and {counted(len(kinds) - _KINDS, 'other kind')}" if len(kinds) > _KINDS else ""
    return [f"not read of {path}: {told}{more}"]


def missing(path: Path) -> str:
    """What a path is that is no file."""
    return "is a folder" if path.is_dir() else "is no file of text" if path.exists() else "does not exist"


def _empty(path: Path) -> DataError:
    return DataError(f"{path} is empty", expected="text", fix="remove the file, or put text into it")


def check_text(path: Path) -> None:
    """Read a file in blocks and make sure that it is UTF-8 text.

    Raises:
        DataError: it is empty, binary or not UTF-8, with the byte offset; or it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                if (zero := block.find(b"\0")) >= 0:
                    raise DataError(
                        f"{path} is binary: zero byte at offset {offset + zero}",
                        expected="UTF-8 text",
                        fix="remove the file, or convert it to UTF-8",
                    )
                pending = len(decoder.getstate()[0])
                _decode(decoder, block, path, offset - pending)
                offset += len(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", expected="a readable file") from error
    if offset == 0:
        raise _empty(path)
    _decode(decoder, b"", path, offset - len(decoder.getstate()[0]), final=True)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, start: int, *, final: bool = False) -> None:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {start + error.start}",
            expected="UTF-8 text",
            fix=f"convert it, for example: iconv -f latin1 -t utf-8 {path.name}",
        ) from error


@dc.dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of a file: whole documents, or a piece of one."""

    start: int
    end: int
    begins: bool = True
    ends: bool = True


class TextFiles:
    """Documents of .txt and .jsonl files. A unit is some neighbouring documents, or a piece of a long text.

    Args:
        files: the files.
        field: column of a .jsonl file that holds the text (or the messages).
        chat: records hold conversations.
        size: bytes of a unit.

    Raises:
        DataError: a file is not usable text.
    """

    def __init__(self, files: list[Path], *, field: str, chat: bool, size: int) -> None:
        self._files = files
        self._field = field
        self._chat = chat
        self._watched = WatchedFiles(files)
        self._of_file, self._start, self._end, self._whole = array("L"), array("Q"), array("Q"), array("B")
        for i, path in enumerate(files):
            if chat and path.suffix in TEXT_SUFFIXES:
                raise DataError(f"{path} is plain text, but the source is `kind: chat`", expected=".jsonl or .parquet")
            check_text(path)
            for span in self._spans(path, size):
                self._of_file.append(i)
                self._start.append(span.start)
                self._end.append(span.end)
                self._whole.append(span.begins + 2 * span.ends)
            self._watched.check(i)
            if path.suffix == ".jsonl" and len(self._start):
                self.read(len(self._start) - 1)  # finds a wrong column name before training starts

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self._start)

    def fingerprint(self) -> dict[str, Any]:
        """Names, number, size and content of the files."""
        return fingerprint(self._files, self._watched)

    def read(self, unit: int) -> list[Document]:
        """The documents of a unit, in file order.

        Raises:
            DataError: a .jsonl line is not JSON or lacks the column, or the file has changed.
        """
        path = self._files[self._of_file[unit]]
        start, end = self._start[unit], self._end[unit]
        try:
            with memory_for(f"reading {path} at byte {start}"), path.open("rb") as file:
                data = FileBytes(file, path).part(start, end)
        except OSError as error:
            raise changed(path) from error
        self._watched.check(self._of_file[unit])
        if path.suffix == ".jsonl":
            return list(self._records(path, start, data))
        where = f"{path} at byte {start}"
        begins, ends = bool(self._whole[unit] & 1), bool(self._whole[unit] & 2)
        return [Document(text=data.decode(), begins=begins, ends=ends, where=where)] if data.strip() else []

    def _records(self, path: Path, start: int, data: bytes) -> Iterator[Document]:
        for line in data.splitlines(keepends=True):
            where = f"{path} at byte {start}"
            start += len(line)
            if line.isspace():
                continue
            yield document_from_record(parsed_record(line, where), self._field, chat=self._chat, where=where)

    def _spans(self, path: Path, size: int) -> Iterator[_Span]:
        """Cut a file: between documents where it can, inside a document only where that is longer than a unit."""
        with path.open("rb") as file:
            data = FileBytes(file, path)
            begin = len(_BOM) if data.part(0, len(_BOM)) == _BOM else 0
            if path.suffix != ".jsonl":
                yield from _pieces(data, begin, len(data), size)
                return
            while begin < len(data):
                end = _group_end(data, begin, size)
                if end - begin > max(size, LARGEST_RECORD):
                    raise too_large(f"{path} at byte {begin}: a line", end - begin)
                yield _Span(begin, end)
                begin = end + 1


def parsed_record(line: bytes, where: str) -> dict[str, Any]:
    """The object on a line of JSON; `where` it stands, for messages.

    Raises:
        DataError: it is none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(
            f"{where}: not JSON ({why})",
            expected="one JSON object on each line",
            fix="correct or remove the line",
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}", expected="one JSON object on each line")
    return record


def too_large(what: str, size: int) -> DataError:
    """That a record has more bytes than are read at once."""
    return DataError(
        f"{what} has {format_bytes(size)}",
        expected=f"{format_bytes(LARGEST_RECORD)} at most",
        fix="cut it into several documents, or store it as .txt, which is read in pieces",
    )


def _group_end(data: FileBytes, begin: int, size: int) -> int:
    """End of the last line that starts within `size` bytes; a longer line is a group of its own."""
    last = data.rfind(b"\n", begin, begin + size)
    if last > begin:
        return last
    first = data.find(b"\n", begin)
    return len(data) if first < 0 else first


def _pieces(data: FileBytes, begin: int, end: int, size: int) -> Iterator[_Span]:
    """Pieces of about `size` bytes, cut after a line break, else after a space, else between two characters."""
    start = begin
    while start < end:
        stop = end if end - start < 2 * size else _cut(data, start + size, end)
        yield _Span(start, stop, begins=start == begin, ends=stop == end)
        start = stop


def _cut(data: FileBytes, target: int, end: int) -> int:
    limit = min(target + _LOOK_AHEAD, end)
    for mark in (b"\n", b" "):
        if (found := data.find(mark, target, limit)) >= 0:
            return found + 1
    while target < end and data.part(target, target + 1)[0] & 0xC0 == 0x80:
        target += 1
    return target


def fingerprint(files: list[Path], watched: WatchedFiles) -> dict[str, Any]:
    """Names, number, size and content of files."""
    sizes = {path.name: path.stat().st_size for path in files}
    return {"files": len(files), "bytes": sum(sizes.values()), "names": sorted(sizes)[:20], SEAL: watched.digest()}
