"""Hub datasets, downloaded (random access) or streamed (in order, nothing kept)."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.hub import ANSWER_SECONDS, hub_errors
from sse_convert.checkpoints.identity import SEAL
from sse_convert.data.documents import Document, document_from_record
from sse_convert.data.watched_files import made_once, stamp_of
from sse_convert.errors import DataError, HubError
from sse_convert.recipe.schema import Source

UNIT_EXAMPLES = 64
HASHED_EXAMPLES = 4096
"""that are hashed at a time"""
SHUFFLE_BUFFER = 1000
"""examples a streamed dataset is shuffled over; its shards are shuffled as well"""


def check_dataset(source: Source, field: str) -> None:
    """Ask the hub whether it has a dataset, so that a misspelt path is found before anything is converted.

    Raises:
        DataError: it has none of the name.
        HubError: it cannot be asked, and the cache does not have the dataset either.
    """
    try:
        _ask(source.path or "")
    except HubError:
        open_hub(source, field, None)


def first_example(path: str, splits: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """What a source must say of a dataset, `name` and `split`, and an example of that.

    Args:
        path: of the dataset.
        splits: to take, best first; without any of them the dataset's first.

    Raises:
        DataError: the hub has none of the name.
        HubError: the hub cannot be asked.
    """
    import datasets

    _ask(path)
    with hub_errors(f"dataset {path}"):
        names = datasets.get_dataset_config_names(path)
        name = next((name for name in ("default", "all") if name in names), names[0])
        found = datasets.get_dataset_split_names(path, name)
        split = next((split for split in splits if split in found), found[0])
        data = datasets.load_dataset(path, name, split=split, streaming=True)
        example: dict[str, Any] = dict(next(iter(data), {}))
    told = {"name": name if name != "default" else None, "split": split if split != "train" else None}
    return {key: value for key, value in told.items() if value}, example


@functools.cache
def _ask(name: str) -> None:
    """Ask the hub for a dataset, unless it has told of it.

    Raises:
        DataError: it has none of the name.
        HubError: it cannot be asked.
    """
    from huggingface_hub import HfApi, errors

    try:
        with hub_errors(name):
            HfApi().dataset_info(name, timeout=ANSWER_SECONDS)
    except HubError as error:
        if isinstance(error.__cause__, errors.RepositoryNotFoundError | errors.HFValidationError):
            raise _unknown(name) from error
        raise


@contextlib.contextmanager
def _answering(name: str) -> Iterator[None]:
    """Where the hub does not answer, let the library read its cache alone: it would ask six times in half a minute.

    Raises:
        DataError: the hub has none of the name.
        HubError: it cannot be asked, and the cache does not have it.
    """
    import datasets

    try:
        _ask(name)
    except HubError as error:
        before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
        try:
            yield
        except HubError:
            raise error from None
        finally:
            datasets.config.HF_HUB_OFFLINE = before
    else:
        yield


def open_hub(source: Source, field: str, seed: int | None) -> "HubTable | HubStream":
    """Open a hub dataset.

    Args:
        source: names the dataset.
        field: column that holds the text (or the messages).
        seed: shuffles a stream; None keeps its order.

    Raises:
        DataError: the dataset, its configuration, its split or the column does not exist.
        HubError: the hub cannot be reached.
    """
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    with _answering(source.path or ""), hub_errors(f"dataset {source.path}"):
        try:
            data = datasets.load_dataset(source.path, source.name, split=source.split, streaming=source.streaming)
        except DatasetNotFoundError as error:
            raise _unknown(source.path) from error
        except (json.JSONDecodeError, UnicodeError):  # no words of the library's own
            raise
        except (ValueError, DatasetsError) as error:  # such as an unknown configuration, with the known ones named
            raise DataError(
                f"dataset {source.path}: {error}",
                fix="correct `name` or `split`, or take another dataset",
            ) from error
    if data.column_names is not None and field not in data.column_names:
        raise DataError(
            f"dataset {source.path}: no column {field!r}",
            expected=f"one of {sorted(data.column_names)}",
            fix="name the column with `field` in the source",
        )
    return (HubStream if source.streaming else HubTable)(source, data, field, seed)


def _unknown(name: str | None) -> DataError:
    return DataError(
        f"{name} is neither a file, a folder nor a dataset on the hub",
        expected="an existing path, or a dataset you may read",
        fix="correct the source's path; for a gated dataset log in with `hf auth login`",
    )


class HubTable:
    """A downloaded dataset, memory-mapped. A unit is some neighbouring examples."""

    def __init__(self, source: Source, data: Any, field: str, seed: int | None) -> None:
        self._source, self._data, self._field = source, data, field

    @property
    def units(self) -> int:
        """Number of units."""
        return -(-len(self._data) // UNIT_EXAMPLES)

    def fingerprint(self) -> dict[str, Any]:
        """Name, number of examples, and content of the column that is read."""
        return {"dataset": self._source.path, "examples": len(self._data), SEAL: self._content}

    @functools.cached_property
    def _content(self) -> str:
        """SHA-256 of the column, at the disk's speed."""
        files = [Path(file["filename"]) for file in self._data.cache_files]
        if not files:  # all in memory
            return self._hashed()
        return made_once([(path, stamp_of(path)) for path in files], self._hashed, f"{self._data.split} {self._field}")

    def _hashed(self) -> str:
        """Whichever way the cache's files are cut."""
        found = hashlib.sha256()
        column = self._data.select_columns([self._field]).with_format("arrow")
        for part in column.iter(HASHED_EXAMPLES):
            for batch in part.combine_chunks().to_batches():
                found.update(memoryview(batch.serialize()))
        return found.hexdigest()

    def read(self, unit: int) -> list[Document]:
        """The documents of a unit, in order.

        Raises:
            DataError: a value is not text (or not a conversation).
        """
        first = unit * UNIT_EXAMPLES
        values = self._data[first : first + UNIT_EXAMPLES][self._field]
        return [_document(self._source, self._field, value, first + i) for i, value in enumerate(values)]


class HubStream:
    """A dataset that is read over the network while training. A unit is the next examples; it has no known end."""

    def __init__(self, source: Source, data: Any, field: str, seed: int | None) -> None:
        self._source, self._field = source, field
        self._data = data if seed is None else data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        self._examples: Iterator[dict[str, Any]] | None = None
        self._next = 0

    @property
    def units(self) -> None:
        """Unknown."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """The dataset's name; a stream's content cannot be identified."""
        return {"dataset": self._source.path}

    def read(self, unit: int) -> list[Document]:
        """The documents of a unit; an empty list behind the end. Reading out of order reads again from the start.

        Raises:
            DataError: a value is not text (or not a conversation).
        """
        if self._examples is None or unit != self._next:
            self._examples = iter(self._data.skip(unit * UNIT_EXAMPLES))
        self._next = unit + 1
        documents = []
        for i in range(UNIT_EXAMPLES):
            example = next(self._examples, None)
            if example is None:
                break
            if self._field not in example:
                raise DataError(
                    f"dataset {self._source.path}: no column {self._field!r}", expected=f"one of {sorted(example)}"
                )
            documents.append(_document(self._source, self._field, example[self._field], unit * UNIT_EXAMPLES + i))
        return documents


def _document(source: Source, field: str, value: Any, index: int) -> Document:
    where = f"dataset {source.path}, example {index}"
    return document_from_record({field: value}, field, chat=source.kind == "chat", where=where)
