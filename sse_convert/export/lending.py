"""What a small checkpoint leaves to its teacher: tensors that are the same there, to the bit."""

import dataclasses as dc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sse_convert.checkpoints.open import CheckpointFiles, download
from sse_convert.checkpoints.safetensors_io import TensorInfo
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.checkpoints.tensor_data import named_chunks
from sse_convert.console import progress
from sse_convert.errors import CheckpointError
from sse_convert.export.shards import require_finite_data
from sse_convert.modeling.loading import Lent, stored_digest


def in_teachers_words(files: CheckpointFiles, teacher: Teacher) -> CheckpointFiles:
    """A checkpoint whose tensors have the names that the teacher has for them."""
    return dc.replace(files, tensors={teacher.stored(name): info for name, info in files.tensors.items()})


def without_lent(files: CheckpointFiles, lent: Lent) -> CheckpointFiles:
    """What is left of a checkpoint where its teacher lends tensors."""
    left = files.tensors.keys() - {name for names in lent.files.values() for name in names}
    return dc.replace(files, tensors={name: info for name, info in files.tensors.items() if name in left})


def lend(files: CheckpointFiles, teacher: Teacher, name: str, dtypes: dict[str, str]) -> Lent:
    """Find the tensors of a checkpoint that its teacher has too.

    Args:
        files: the checkpoint, by the teacher's names.
        teacher: the model that it was made from.
        name: what the recipe calls that one.
        dtypes: safetensors dtype in which each tensor would be stored.

    Raises:
        CheckpointError: there are none, weights are not finite, or the teacher cannot be read.
        HubError: the teacher's weights are on a hub that cannot be reached.
    """
    theirs = download(teacher.files)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    with progress("comparing with the teacher", len(files.tensors)) as bar:
        for tensor, info in files.tensors.items():
            other = theirs.tensors.get(tensor)
            if other is not None and (other.dtype, other.shape) == (dtypes[tensor], info.shape):
                own = _digest(files, tensor, info, dtypes[tensor])
                if own == _digest(theirs, tensor, other, other.dtype):
                    found[other.shard][tensor] = own
            bar.update()
    if not found:
        raise CheckpointError(
            f"{files.name} has no tensor as its teacher {name} has it: a small checkpoint of it would hold all",
            expected="tensors that training left alone, in the teacher's type",
            fix="export it whole: leave out --delta and export.delta",
        )
    place = name if theirs.revision else f"./{Path(name).absolute().name}"
    return Lent(teacher=place, revision=theirs.revision, files=dict(found))


def _digest(files: CheckpointFiles, name: str, info: TensorInfo, dtype: str) -> str:
    """Of a tensor as it would be stored."""

    def pieces() -> Iterator[bytes | memoryview]:
        for _, data in named_chunks(files.folder, name, info, dtype):
            require_finite_data(data, name, dtype, files.name)
            yield data

    return stored_digest(dtype, info.shape, pieces())
