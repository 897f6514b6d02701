"""The weights of a checkpoint in shards of bounded size, streamed in pieces from wherever each tensor lies."""

from collections.abc import Iterator
from pathlib import Path

from sse_convert.checkpoints.manifest import FileRecord
from sse_convert.checkpoints.open import SINGLE, CheckpointFiles
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES, TensorInfo, write_shard
from sse_convert.checkpoints.tensor_data import named_chunks, nonfinite
from sse_convert.checkpoints.weights import write_index
from sse_convert.console import progress
from sse_convert.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
"""of the largest shard"""


def assigned(tensors: dict[str, TensorInfo], dtypes: dict[str, str], limit: int) -> dict[str, list[str]]:
    """Shard to tensor names, in the checkpoint's order, none larger than `limit` bytes unless it is a single tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        nbytes = info.numel * ITEM_BYTES[dtypes[name]]
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_weights(
    files: CheckpointFiles, folder: Path, shards: dict[str, list[str]], dtypes: dict[str, str]
) -> dict[str, FileRecord]:
    """Write the shards and their index, in pieces; the shards' records."""

    def converted(names: list[str]) -> Iterator[tuple[str, bytes | memoryview]]:
        for name in names:
            for piece in named_chunks(files.folder, name, files.tensors[name], dtypes[name]):
                require_finite_data(piece[1], name, dtypes[name], files.name)
                yield piece
            bar.update()

    records = {}
    with progress("writing weights", len(files.tensors)) as bar:
        for shard, names in shards.items():
            layout = {name: (dtypes[name], files.tensors[name].shape) for name in names}
            sha256 = write_shard(folder / shard, layout, converted(names))
            records[shard] = FileRecord((folder / shard).stat().st_size, sha256)
    if len(shards) > 1:
        write_index(folder, list(shards))
    return records


def require_finite_data(data: bytes | memoryview, name: str, dtype: str, checkpoint: str) -> None:
    """Look at a piece of a tensor.

    Raises:
        CheckpointError: it holds NaN or Inf.
    """
    if data and nonfinite(memoryview(data), dtype):
        raise CheckpointError(
            f"tensor {name} of {checkpoint} is NaN or infinite as {dtype}",
            expected="finite weights",
            fix="export with dtype bfloat16 or float32, or use an earlier checkpoint",
        )
