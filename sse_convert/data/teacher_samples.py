"""Text sampled from the teacher: training and held-out text where there is no other, cached on disk."""

import dataclasses as dc
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.console import progress
from sse_convert.data.documents import Document, Ids
from sse_convert.files import replacing
from sse_convert.trust import trusts_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_AT_ONCE = 16384
"""rows * length sampled in one batch"""
MAX_BATCH = 64
CACHE_VARIABLE = "SSE_CONVERT_CACHE"


def cache_folder() -> Path:
    """Where samples are kept: $SSE_CONVERT_CACHE, else sse-convert in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sse-convert"


@dc.dataclass(frozen=True, slots=True)
class SamplingTeacher:
    """The model text is sampled from."""

    model: str
    """hub id or local folder"""
    revision: str | None
    """hub revision"""
    files: Callable[[], CheckpointFiles]
    """the same, all of it on this machine; asked for when text is sampled"""

    def fingerprint(self) -> str:
        """Identity of the weights."""
        return checkpoint_identity(self.model, self.revision)

    def load(self) -> "PreTrainedModel":
        """The model, frozen, on this process's device: float32 on a CPU, else bfloat16.

        Raises:
            CheckpointError: its weights are not finite.
        """
        import torch
        from accelerate import PartialState
        from transformers import GenerationConfig

        from sse_convert.checkpoints.weights import require_finite
        from sse_convert.modeling.auto import auto_class

        device, files = PartialState().device, self.files()
        model: Any = auto_class(files.model_type).from_pretrained(
            files.folder,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            trust_remote_code=trusts_code(),
            generation_config=GenerationConfig(),  # its own penalties and forbidden tokens are no part of its text
        )
        frozen: PreTrainedModel = model.eval().requires_grad_(False).to(device)
        require_finite(frozen, self.model)
        return frozen


class TeacherSamples:
    """Documents sampled from the teacher, at temperature 1, from its beginning-of-sequence token to its end token.

    They are sampled when first read, by one process of each machine, unless the cache has them. A unit is one document.

    Args:
        teacher: the model.
        tokenizer: names the first and the end token.
        rows: documents to sample.
        length: most tokens of a document.
        seed: equal seeds give equal text (on the same machine and libraries).
    """

    def __init__(
        self,
        teacher: SamplingTeacher,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        rows: int,
        length: int,
        seed: tuple[int, ...],
    ) -> None:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self._teacher, self._rows, self._length, self._seed = teacher, rows, length, seed
        self._first = 0 if first is None else int(first)
        self._end = None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        self._samples: list[Ids] = []

    @property
    def units(self) -> int:
        """Number of units."""
        return self._rows

    def fingerprint(self) -> dict[str, Any]:
        """Everything the samples depend on."""
        return {
            "teacher": self._teacher.fingerprint(),
            "rows": self._rows,
            "length": self._length,
            "seed": list(self._seed),
            "first": self._first,
            "end": self._end,
        }

    def read(self, unit: int) -> list[Document]:
        """One sampled document."""
        self.prepare()
        return [Document(ids=self._samples[unit], where=f"teacher sample {unit}")]

    def prepare(self) -> None:
        """Sample now, or read the cache."""
        self._samples = self._samples or self._load()

    def _load(self) -> list[Ids]:
        key = hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()[:32]
        path = cache_folder() / "teacher-samples" / f"{key}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if (found := _stored(path)) is None:
                found = self._sample()
                _save(path, found)
        return found

    def _sample(self) -> list[Ids]:
        """Sample in batches, leaving torch's own random state as it was."""
        import torch
        from transformers import GenerationConfig

        model: Any = self._teacher.load()
        settings: Any = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_length=self._length,
            bos_token_id=self._first,
            eos_token_id=self._end,
            pad_token_id=self._first if self._end is None else self._end,
        )
        batch = max(1, min(MAX_BATCH, TOKENS_AT_ONCE // self._length))
        samples: list[Ids] = []
        devices = [] if model.device.type == "cpu" else [model.device]
        with torch.random.fork_rng(devices), progress("sampling text from the teacher", self._rows) as bar:
            torch.manual_seed(int(np.random.SeedSequence(self._seed).generate_state(1, np.uint64)[0] >> 1))
            while len(samples) < self._rows:
                count = min(batch, self._rows - len(samples))
                prompt = torch.full((count, 1), self._first, device=model.device)
                rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
                samples += [self._trimmed(row) for row in rows.cpu().numpy().astype(np.int32)]
                bar.update(count)
        return samples

    def _trimmed(self, row: Ids) -> Ids:
        """The row up to its first end token (the start token may be the same one)."""
        if self._end is None:
            return row
        ends = np.flatnonzero(row[1:] == self._end)
        return row[: ends[0] + 2] if len(ends) else row


def _stored(path: Path) -> list[Ids] | None:
    """Samples that were kept; None where they were not, or the file is damaged (it holds checksums)."""
    try:
        with np.load(path) as stored:
            return np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _save(path: Path, samples: list[Ids]) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, ids=np.concatenate(samples), lengths=np.array([len(sample) for sample in samples]))
