"""The models that converted checkpoints are compared with: each is opened once, however many checkpoints there are."""

import dataclasses as dc
import functools
import hashlib
from pathlib import Path

from sse_convert.checkpoints.open import CheckpointFiles, download, open_checkpoint
from sse_convert.checkpoints.provenance import Provenance
from sse_convert.checkpoints.tensor_data import named_chunks
from sse_convert.errors import CheckpointError, HubError


@dc.dataclass(frozen=True, slots=True)
class Original:
    """A model with its weights, and what is known of them."""

    files: CheckpointFiles
    _digests: dict[tuple[str, str], str] = dc.field(default_factory=dict)
    """(tensor, dtype) -> SHA-256 of its values in that dtype"""

    def digest(self, name: str, dtype: str) -> str:
        """SHA-256 of a tensor's values in a dtype."""
        if (name, dtype) not in self._digests:
            self._digests[name, dtype] = tensor_digest(self.files, name, dtype)
        return self._digests[name, dtype]


class Originals:
    """The model that a user named as the teacher, or the one that a checkpoint says it was made from.

    Args:
        named: folder or hub id, opened when it is asked for; None for each checkpoint's own.
    """

    def __init__(self, named: Path | str | None) -> None:
        self._named = named
        self._open = functools.cache(lambda source: Original(download(open_checkpoint(source))))

    def named(self) -> Original | None:
        """The named one, if there is one.

        Raises:
            CheckpointError, HubError: see `open_checkpoint`; it says that `--teacher` is to be corrected.
        """
        if self._named is None:
            return None
        try:
            return self._open(self._named)
        except HubError as error:
            fix = "correct --teacher" + (f", or {error.fix}" if error.fix else "")
            raise HubError(error.what, expected=error.expected, fix=fix) from error
        except CheckpointError as error:
            raise CheckpointError(error.what, expected=error.expected, fix="correct --teacher") from error

    def of(self, provenance: Provenance | None) -> Original | None:
        """The named one, or that of a checkpoint's provenance; None where neither is at hand.

        Raises:
            CheckpointError, HubError: see `named` and `open_checkpoint`.
        """
        folder = "" if provenance is None else provenance.teacher_folder
        return self.named() or (self._open(folder) if folder and Path(folder).is_dir() else None)


def tensor_digest(files: CheckpointFiles, name: str, dtype: str) -> str:
    """SHA-256 of a stored tensor's values in a dtype."""
    found = hashlib.sha256()
    for _, data in named_chunks(files.folder, name, files.tensors[name], dtype):
        found.update(data)
    return found.hexdigest()
