"""Training rows: sources mixed by weight, needles planted, ready for a model; the same for any number of processes.

R rows, T tokens per row.
"""

import dataclasses as dc
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sse_convert.checkpoints.identity import SEAL
from sse_convert.console import progress
from sse_convert.data.documents import Encoder
from sse_convert.data.hub_datasets import check_dataset, open_hub
from sse_convert.data.needle import KeyWords, load_words
from sse_convert.data.packing import IGNORED, Corpus, Cursor, Packed, Packer, packed_rows
from sse_convert.data.parquet_files import ParquetFiles
from sse_convert.data.recall_rows import crowding, recall_row
from sse_convert.data.teacher_samples import SamplingTeacher, TeacherSamples
from sse_convert.data.text_files import TextFiles, find_files, unit_bytes
from sse_convert.data.watched_files import WatchedFiles
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Needles, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["train", "valid"]
LossMask = Literal["all", "assistant"]
_ROLE_SEED: dict[Role, int] = {"train": 0, "valid": 1}


@dc.dataclass(frozen=True, slots=True)
class Row:
    """One row, and where the next one starts."""

    input_ids: npt.NDArray[np.int32]
    """[T]"""
    position_ids: npt.NDArray[np.int32]
    """[T] 0 at the start of each document and of the row"""
    labels: npt.NDArray[np.int32]
    """[T] the token itself, -100 where it is not to be predicted: first tokens of documents, masked tokens"""
    position: dict[str, Any]
    """JSON-ready; `rows(start=...)` continues behind this row"""
    answers: npt.NDArray[np.int32] | None = None
    """[T] with `needles.answers: row`: the token itself where it belongs to an answer that the row tells, else -100"""

    @property
    def number(self) -> int:
        """How many rows of the stream come before this one."""
        return int(self.position["row"]) - 1


def stack(batch: Sequence[Row]) -> dict[str, Tensor]:
    """int64 tensors `input_ids`, `position_ids` and `labels` [R, T] from R rows. Documents never need a mask."""
    names = ("input_ids", "position_ids", "labels")
    return {name: torch.from_numpy(np.stack([getattr(row, name) for row in batch])).long() for name in names}


def open_corpus(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    seq_len: int,
    *,
    seed: tuple[int, ...],
    shuffle: bool = True,
    teacher: SamplingTeacher | None = None,
) -> Corpus:
    """Open one source: check its files, find its documents. A teacher source samples when it is first read.

    Raises:
        DataError: the source does not exist or is not usable text.
        HubError: the hub cannot be reached.
    """
    if source.kind == "teacher":
        if teacher is None:
            raise DataError("a `kind: teacher` source needs the teacher", expected="a recipe that names a model")
        return TeacherSamples(teacher, tokenizer, rows=source.rows, length=source.length or seq_len, seed=seed)
    if _is_hub(source):
        generated = int(np.random.SeedSequence(seed).generate_state(1)[0])
        return open_hub(source, _field(source), generated if shuffle else None)
    return open_files(source, seq_len)


def check_sources(sources: Sequence[Source]) -> None:
    """Read local text through once, without a tokenizer, and ask the hub for datasets, so that a run of many stages
    does not trip over them later.

    Raises:
        DataError: a source does not exist or is not usable text.
        HubError: the hub cannot be asked for a dataset that is not in its cache either.
    """
    for source in sources:
        if is_local(source):
            open_files(source, seq_len=1)
        elif _is_hub(source):
            check_dataset(source, _field(source))


def text_digests(sources: Sequence[Source]) -> list[dict[str, str]]:
    """What changes with the content of local sources, one entry for each source; those elsewhere have an empty one.

    Raises:
        DataError: a source does not exist.
    """
    return [
        {SEAL: WatchedFiles(find_files(Path(source.path or ""))).digest()} if is_local(source) else {}
        for source in sources
    ]


def is_local(source: Source) -> bool:
    """Whether a source is files here, and not a dataset of a hub or samples of the teacher."""
    return source.kind != "teacher" and not _is_hub(source)


def is_missing(source: Source) -> bool:
    """Whether a source is files, and they are not here."""
    return is_local(source) and not Path(source.path or "").expanduser().exists()


def open_files(source: Source, seq_len: int) -> Corpus:
    """Open a local source: check its files, find its documents.

    Raises:
        DataError: it does not exist or is not usable text.
    """
    if not source.path:
        raise DataError(f"a {source.kind} source has no path", expected="a file, folder or hub dataset")
    with progress("reading text", 1):
        return _opened(source, seq_len)


def _opened(source: Source, seq_len: int) -> Corpus:
    path, chat = Path(source.path or ""), source.kind == "chat"
    files = find_files(path)
    parquet = [file for file in files if file.suffix == ".parquet"]
    if parquet and len(parquet) < len(files):
        raise DataError(f"{path} mixes .parquet with other files", expected="one kind", fix="make two sources of it")
    if parquet:
        return ParquetFiles(files, field=_field(source), chat=chat)
    return TextFiles(files, field=_field(source), chat=chat, size=unit_bytes(seq_len))


def _field(source: Source) -> str:
    return "messages" if source.kind == "chat" else source.field


def _is_hub(source: Source) -> bool:
    """Whether a path is no file here, but could be `owner/name` or `name` on the hub, and not the name of a file."""
    path = source.path or ""
    could_be = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")
    return bool(path) and could_be and Path(path).suffix not in _FILE_SUFFIXES and not Path(path).exists()


_FILE_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet", ".csv", ".gz", ".zip")


class RowReader:
    """Opens sources and yields rows.

    Row i draws its source by weight, and whether it carries needles, from (seed, i) alone; each source is packed in its
    own seeded order. Held-out text (role valid) is read once, a row of each source in turn, in file order and without
    needles.

    Args:
        sources: where text comes from.
        tokenizer: the model's tokenizer.
        seq_len: tokens per row (T).
        seed: fixes the order, the mixture and the needles.
        order: added to the seed, but for what a teacher samples: other rows of the same text.
        needles: retrieval rows to plant.
        role: train or valid.
        sampled_as: role whose samples of the teacher are read; None for `role`.
        loss_mask: assistant leaves only assistant turns of chat sources in `labels`; plain text always counts in full.
        teacher: samples the text of `kind: teacher` sources.
        vocab_size: rows of the model's embedding, to refuse a foreign tokenizer.

    Raises:
        DataError: a source is not usable, there is none, or the tokenizer does not fit.
        HubError: the hub cannot be reached.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: "PreTrainedTokenizerBase",
        seq_len: int,
        seed: int,
        *,
        order: int = 0,
        needles: Needles | None = None,
        role: Role = "train",
        sampled_as: Role | None = None,
        loss_mask: LossMask = "all",
        teacher: SamplingTeacher | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if not sources:
            raise DataError(f"the recipe names no text in data.{role}", expected="at least one source")
        self._encoder = Encoder(tokenizer, vocab_size)
        self._tokenizer, self._seq_len, self._seed = tokenizer, seq_len, seed + order
        self._role, self._loss_mask = role, loss_mask
        self._needles = needles if needles is not None and needles.share > 0 and role == "train" else None
        self._words = load_words(self._needles.words) if self._needles else KeyWords((), ())
        self._try_needles()
        self._weights = np.cumsum([source.weight for source in sources])
        kind = _ROLE_SEED[sampled_as or role]
        self._seeds = [(self._seed, kind, i) for i in range(len(sources))]
        text_seeds = [(seed if source.kind == "teacher" else self._seed, kind, i) for i, source in enumerate(sources)]
        self._corpora = [
            open_corpus(source, tokenizer, seq_len, seed=own, shuffle=role == "train", teacher=teacher)
            for source, own in zip(sources, text_seeds, strict=True)
        ]

    def _try_needles(self) -> None:
        """Make one row of each form and kind now, so that rows that are too short are refused at the start."""
        if self._needles is not None:
            for form, kind in itertools.product(self._needles.drawn_forms, self._needles.kinds):
                one = dc.replace(self._needles, forms={form: 1.0}, kinds=[kind], keys=[1])
                recall_row(random.Random(0), [0] * self._seq_len, self._seq_len, one, self._tokenizer, self._words)

    def crowding(self) -> str | None:
        """That rows are too short for half of the largest number of needles, in words; None if they are not."""
        if self._needles is None:
            return None
        return crowding(self._seq_len, self._needles, self._tokenizer, self._words)

    def fingerprint(self) -> list[dict[str, Any]]:
        """JSON-ready data, one entry per source, that changes when the text does."""
        return [corpus.fingerprint() for corpus in self._corpora]

    def prepare(self) -> None:
        """Sample the text of teacher sources now, where a progress bar can be shown, and not with the first row."""
        for corpus in self._corpora:
            if isinstance(corpus, TeacherSamples):
                corpus.prepare()

    def rows(self, start: dict[str, Any] | None = None) -> Iterator[Row]:
        """Rows without end (train) or for one pass (valid).

        Args:
            start: the `position` of the last row already used.

        Raises:
            DataError: held-out text does not fill a single row, or a document cannot be used.
        """
        if self._role == "train":
            yield from self._endless(start)
        else:
            yield from self._once()

    def _packer(self, i: int, cursor: Cursor) -> Packer:
        train = self._role == "train"
        return Packer(
            self._corpora[i],
            self._encoder,
            self._seq_len,
            seed=self._seeds[i] if train else None,
            passes=None if train else 1,
            cursor=cursor,
        )

    def _once(self) -> Iterator[Row]:
        index = 0
        turns = itertools.zip_longest(*(packed_rows(self._packer(i, Cursor())) for i in range(len(self._corpora))))
        for packed in itertools.chain.from_iterable(turns):
            if packed is not None:
                index += 1
                yield self._row(packed, {"row": index, "sources": []})
        if index == 0:
            raise DataError(
                f"the held-out text is shorter than one row of {self._seq_len} tokens",
                expected=f"{self._seq_len} tokens or more",
                fix="add text to data.valid, or use shorter windows",
            )

    def _endless(self, start: dict[str, Any] | None) -> Iterator[Row]:
        index = start["row"] if start else 0
        cursors = [Cursor(*values) for values in start["sources"]] if start else [Cursor()] * len(self._corpora)
        packers = [self._packer(i, cursor) for i, cursor in enumerate(cursors)]
        while True:
            draw = np.random.default_rng([self._seed, index])
            chosen = int(np.searchsorted(self._weights, draw.random() * self._weights[-1], side="right"))
            packed = packers[chosen].row()
            assert packed is not None, "a training source is read for ever"
            known = np.zeros(self._seq_len, dtype=np.bool_)
            if self._needles is not None and draw.random() < self._needles.share:
                packed, known = self._plant(packed, self._needles, int(draw.integers(2**63)))
            index += 1
            row = self._row(packed, {"row": index, "sources": [list(dc.astuple(p.cursor)) for p in packers]})
            if self._needles is not None and self._needles.answers == "row":
                row = dc.replace(row, answers=np.where(known, row.labels, IGNORED))
            yield row

    def _plant(self, packed: Packed, needles: Needles, seed: int) -> tuple[Packed, npt.NDArray[np.bool_]]:
        """A row of one document, with needles in the text of `packed`, and where the row tells the next token. As it
        is, where it is too short for what was drawn, which is longer than what `_try_needles` drew."""
        T = self._seq_len
        haystack = packed.ids.tolist()
        try:
            made = recall_row(random.Random(seed), haystack, T, needles, self._tokenizer, self._words)
        except DataError:
            return packed, np.zeros(T, dtype=np.bool_)
        ids, answers = np.array(made.token_ids, dtype=np.int32), np.array(made.answers, dtype=np.bool_)
        return Packed(ids, np.arange(T, dtype=np.int32), np.ones(T, dtype=np.bool_)), answers

    def _row(self, packed: Packed, position: dict[str, Any]) -> Row:
        hidden = packed.positions == 0
        if self._loss_mask == "assistant":
            hidden |= ~packed.assistant
        return Row(packed.ids, packed.positions, np.where(hidden, IGNORED, packed.ids), position)
