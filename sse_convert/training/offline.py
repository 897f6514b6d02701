"""The teacher's predictions on disk, row by row in training order: written once, then no teacher is needed.

A cache is a folder with `inputs.json`, which says what it was made from, and shards `rows-000000.safetensors` of equal
numbers of rows. A shard appears under its name when it is whole, and holds a hash of its content; row r of the training
text is row r of the cache.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sse_convert.checkpoints.identity import SEAL, data_digest, read_sealed, write_sealed
from sse_convert.console import progress
from sse_convert.data.rows import Row, stack
from sse_convert.data.teacher_samples import cache_folder
from sse_convert.errors import CheckpointError, OutputError
from sse_convert.files import sync
from sse_convert.modeling.head import token_chunks
from sse_convert.recipe.stage_settings import Offline
from sse_convert.report import format_bytes, json_ready
from sse_convert.training.checkpoint import writing
from sse_convert.training.losses import compute_dtype
from sse_convert.training.objective import Batch, Frozen
from sse_convert.training.stage_record import refuse_changes
from sse_convert.training.topk_kl import NAMES, Truncated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUTS = "inputs.json"
SHARD_BYTES = 1 << 28
MOST_ROWS = 256
"""rows of a shard"""


class TeacherCache:
    """Predictions of the rows of one stage.

    Args:
        offline: tokens kept, the folder.
        inputs: everything the predictions depend on, JSON-ready.
        rows: rows that the stage reads.
        seq_len: tokens per row (T).

    Raises:
        TrainingError: the folder was made from other inputs.
        OutputError: the folder holds something else.
    """

    def __init__(self, offline: Offline, inputs: dict[str, Any], *, rows: int, seq_len: int) -> None:
        self._offline, self._rows, self._seq_len = offline, rows, seq_len
        self._inputs = json_ready({**inputs, "seq_len": seq_len, "top_k": offline.top_k, "dtype": "float16"})
        below = cache_folder() / "teacher-logits" / data_digest(self._inputs)[:32]
        self.folder = below if offline.dir is None else Path(offline.dir).expanduser()
        self._shard_rows = max(1, min(MOST_ROWS, SHARD_BYTES // (seq_len * offline.bytes_per_token)))
        self._open: tuple[int, Any] | None = None
        self._check()

    def missing(self) -> list[range]:
        """Rows of the shards that are not there yet, or do not hold all rows that this stage reads."""
        size = self._shard_rows
        shards = [range(first, min(first + size, self._rows)) for first in range(0, self._rows, size)]
        return [shard for shard in shards if self._stored_rows(self._path(shard.start)) < len(shard)]

    def fill(
        self,
        accelerator: Accelerator,
        rows: Iterator[Row],
        load: Callable[[], Frozen],
        micro_batch: int,
        vocabulary: int | None = None,
    ) -> None:
        """Write what is missing, shared out over the processes; every process must call it.

        Args:
            accelerator: of the stage.
            rows: training rows from the first one on.
            load: makes the teacher; not called if nothing is missing.
            micro_batch: rows of one forward pass.
            vocabulary: tokens that are predicted; None means all of the teacher's.

        Raises:
            OutputError: the disk has too little room, or cannot be written.
        """
        with self._locked(accelerator):
            missing = self.missing()
            accelerator.wait_for_everyone()
            if not missing:
                return
            self._check_space(sum(map(len, missing)) * self._seq_len * self._offline.bytes_per_token)
            if own := missing[accelerator.process_index :: accelerator.num_processes]:
                predict = Predictor(load(), accelerator, self._offline, vocabulary)
                self._write(own, rows, predict, micro_batch)
            accelerator.wait_for_everyone()

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Predictions of chosen rows, stacked, under the names of `Truncated.of_batch`."""
        found = [self._row(row) for row in rows]
        return {name: torch.stack([row[name] for row in found]) for name in NAMES}

    def _row(self, row: int) -> dict[str, Tensor]:
        first = row // self._shard_rows * self._shard_rows
        if self._open is None or self._open[0] != first:
            self._open = first, _opened(self._path(first))
        return {name: self._open[1].get_slice(name)[row - first] for name in NAMES}

    def _write(self, shards: list[range], rows: Iterator[Row], predict: "Predictor", micro_batch: int) -> None:
        position = 0
        with progress("predictions of the teacher", sum(map(len, shards))) as bar:
            for shard in shards:
                chosen = list(islice(rows, shard.start - position, shard.stop - position))
                position = shard.stop
                found = []
                for start in range(0, len(chosen), micro_batch):
                    found.append(predict(stack(chosen[start : start + micro_batch])))
                    bar.update(len(chosen[start : start + micro_batch]))
                self._save(shard.start, {name: torch.cat([part[name] for part in found]) for name in NAMES})

    def _save(self, first: int, tensors: dict[str, Tensor]) -> None:
        final = self._path(first)
        partial = self.folder / f".{final.name}"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        partial.mkdir()
        with writing(partial):
            save_file(tensors, partial / final.name, metadata={SEAL: _content(tensors)})
            sync(partial / final.name)
        (partial / final.name).replace(final)
        partial.rmdir()

    def _path(self, first: int) -> Path:
        return self.folder / f"rows-{first:06d}.safetensors"

    def _stored_rows(self, path: Path) -> int:
        try:
            with safe_open(path, "pt") as file:
                return int(file.get_slice(NAMES[0]).get_shape()[0])
        except (OSError, SafetensorError):  # not there, or cut short: it is written anew
            return 0

    def _check(self) -> None:
        if (before := read_sealed(self.folder / INPUTS)) is not None:
            refuse_changes(self.folder, before, self._inputs)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise OutputError(
                f"{self.folder} is no cache of a teacher's predictions, or its {INPUTS} is damaged",
                expected="a new folder, or one that an earlier run made",
                fix="correct the stage's offline.dir, or remove the folder: the teacher predicts again",
            )

    @contextlib.contextmanager
    def _locked(self, accelerator: Accelerator) -> Iterator[None]:
        """Make the folder; on the main process, keep other runs out of it."""
        main = accelerator.is_main_process
        if main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"{self.folder} cannot be made: {error.strerror}", fix="set offline.dir") from error
        with FileLock(self.folder.with_name(f"{self.folder.name}.lock")) if main else contextlib.nullcontext():
            if main and not (self.folder / INPUTS).is_file():
                write_sealed(self.folder / INPUTS, self._inputs)
            accelerator.wait_for_everyone()
            yield

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OutputError(
                f"{self.folder} has {format_bytes(free)} free; the teacher's predictions take {format_bytes(needed)}",
                expected=f"room for {self._offline.bytes_per_token} bytes per token",
                fix="free space, lower offline.top_k, or set offline.dir to a folder on a larger disk",
            )


def _opened(path: Path) -> Any:
    """A shard, open for reading.

    Raises:
        CheckpointError: its content is not what was written. Shards of earlier versions have no hash.
    """
    try:
        shard: Any = safe_open(path, "pt")
        stored = (shard.metadata() or {}).get(SEAL)
        if stored in (None, _content({name: shard.get_tensor(name) for name in NAMES})):
            return shard
    except (OSError, SafetensorError):
        pass
    raise CheckpointError(
        f"{path} is damaged",
        expected="the teacher's predictions as they were written",
        fix="remove the file and run again: its rows are predicted again",
    )


def _content(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the tensors of a shard."""
    found = hashlib.sha256()
    for name in NAMES:
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


class Predictor:
    """A teacher's truncated predictions of micro batches, made in chunks that never hold a batch's logits.

    Args:
        teacher: the frozen teacher.
        accelerator: its precision is that of the stage.
        offline: tokens kept.
        vocabulary: tokens that are predicted; None means all of the teacher's.
    """

    def __init__(
        self, teacher: Frozen, accelerator: Accelerator, offline: Offline, vocabulary: int | None = None
    ) -> None:
        self._teacher, self._accelerator, self._offline, self._vocabulary = teacher, accelerator, offline, vocabulary

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Predictions of a micro batch, on the CPU: index [R, T, k], log probabilities [R, T, k], log mass [R, T]."""
        moved = {name: value.to(self._accelerator.device) for name, value in batch.items()}
        with self._accelerator.autocast():
            hidden, head = self._teacher(moved["input_ids"], moved["position_ids"])
            flat = hidden.flatten(0, 1).to(compute_dtype(hidden))
            head = head.first(self._vocabulary).in_dtype(flat.dtype)
            parts = [
                self._stored(Truncated.of(head.logits(flat[part]), self._offline.top_k))
                for part in token_chunks(flat.shape[0], head.weight.shape[0], flat.device)
            ]
        rows, length = batch["input_ids"].shape
        whole = {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(NAMES)}
        return {name: value.reshape(rows, length, *value.shape[1:]) for name, value in whole.items()}

    def _stored(self, found: Truncated) -> tuple[Tensor, Tensor, Tensor]:
        return found.index.int().cpu(), found.log_p.half().cpu(), found.log_rest.float().cpu()


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash of what decides how a tokenizer makes tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules = None if backend is None else backend.to_str()
    return data_digest([type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map, rules])
