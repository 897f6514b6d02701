"""Text that is both trained on and held out: the same files, or the same documents among the first of each source."""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from sse_convert.data.packing import Corpus
from sse_convert.data.rows import is_local, open_files
from sse_convert.data.text_files import find_files
from sse_convert.recipe.schema import Source
from sse_convert.report import counted

DOCUMENTS = 4096
"""documents of a source that are compared"""
SHORTEST = 64
"""characters from which equal documents are no coincidence"""
_COMPARED = 1 << 20
"""bytes of a file's start that are compared beside its size"""


def overlap(train: Sequence[Source], valid: Sequence[Source]) -> list[str]:
    """What of the held-out text is also in the training text, one sentence per held-out source.

    Local files are compared by size and start, their first documents by hash. Datasets of a hub are compared by name
    and split alone, and samples of the teacher are not: they are drawn apart.

    Args:
        train: `data.train`.
        valid: `data.valid`.

    Raises:
        DataError: a local source does not exist or is not usable text.
    """
    found = []
    trained_files = {key for source in train if is_local(source) for key in _files(source)}
    trained_documents = {key for source in train if is_local(source) for key in _documents(source)}
    names = {_dataset(source) for source in train if not is_local(source) and source.kind != "teacher"}
    for source in valid:
        if source.kind == "teacher":
            continue
        if not is_local(source):
            if _dataset(source) in names:
                found.append(f"data.valid has {source.path}, split {source.split}, which data.train has as well")
        elif files := [path for key, path in _files(source).items() if key in trained_files]:
            found.append(f"data.train has {counted(len(files), 'file')} of data.valid as well, such as {files[0]}")
        elif shared := sum(key in trained_documents for key in _documents(source)):
            found.append(f"data.train has {shared} of the first documents of {source.path} in data.valid as well")
    return found


def _dataset(source: Source) -> tuple[str | None, ...]:
    return source.path, source.name, source.split


def _files(source: Source) -> dict[tuple[int, bytes], Path]:
    found = {}
    for path in find_files(Path(source.path or "")):
        with path.open("rb") as file:
            found[path.stat().st_size, blake2b(file.read(_COMPARED)).digest()] = path
    return found


def _documents(source: Source) -> Iterator[bytes]:
    """Hashes of the first documents that are long enough."""
    texts = (text for text in islice(_texts(open_files(source, seq_len=1)), DOCUMENTS) if len(text) >= SHORTEST)
    return (blake2b(text.encode()).digest() for text in texts)


def _texts(corpus: Corpus) -> Iterator[str]:
    for unit in range(corpus.units or 0):
        for document in corpus.read(unit):
            yield document.text.strip() if document.text is not None else json.dumps(document.messages)
