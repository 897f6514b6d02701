"""Tensor data in shards, in pieces of bounded size: read, compare, hash, look for NaN and Inf."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sse_convert.console import Bar, progress
from sse_convert.errors import CheckpointError
from sse_convert.surgery.checkpoint import CheckpointFiles
from sse_convert.surgery.safetensors_io import ITEM_BYTES, TensorInfo

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""safetensors dtype -> torch dtype"""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CHUNK_BYTES = 1 << 25


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of `tensor` in row-major order, as safetensors stores them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_tensor(folder: Path, info: TensorInfo) -> Tensor:
    """One whole tensor of a shard, any shape."""
    with (folder / info.shard).open("rb") as file:
        file.seek(info.start)
        data = bytearray(file.read(info.nbytes))
    if not data:
        return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype]).reshape(info.shape)


def chunks(folder: Path, info: TensorInfo) -> Iterator[memoryview]:
    """The data of one tensor in pieces of at most 32 MiB, each a whole number of elements; valid until the next one.

    Raises:
        CheckpointError: the file became shorter while it was read.
    """
    buffer = memoryview(bytearray(min(info.nbytes, CHUNK_BYTES)))
    left = info.nbytes
    with (folder / info.shard).open("rb", buffering=0) as file:
        file.seek(info.start)
        while left:
            piece = buffer[: min(left, CHUNK_BYTES)]
            filled = 0
            while filled < len(piece):
                count = file.readinto(piece[filled:])
                if not count:
                    raise CheckpointError(
                        f"shard {folder / info.shard} ended while it was read", fix="do not change it meanwhile"
                    )
                filled += count
            left -= len(piece)
            yield piece


def nonfinite(data: memoryview, dtype: str) -> int:
    """How many of the elements in `data` are NaN or infinite."""
    if not TORCH_DTYPES[dtype].is_floating_point:
        return 0
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])
    values = values.float() if ITEM_BYTES[dtype] == 1 else values
    low, high = torch.aminmax(values)  # NaN propagates; far quicker than looking at each element
    if bool(low.isfinite() & high.isfinite()):
        return 0
    return values.numel() - int(values.isfinite().sum())


def check_weights(files: CheckpointFiles) -> dict[str, str]:
    """Stream every shard once: hash it and look for NaN and Inf.

    Returns:
        SHA-256 of each shard.

    Raises:
        CheckpointError: some weights are NaN or infinite.
    """
    digests: dict[str, str] = {}
    bad: dict[str, int] = {}
    with progress("checking weights", len(files.tensors)) as bar:
        for shard in files.shard_bytes:
            tensors = {name: info for name, info in files.tensors.items() if info.shard == shard}
            with (files.folder / shard).open("rb") as file:
                sha = hashlib.sha256(file.read(min(info.start for info in tensors.values()) if tensors else -1))
            for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
                found = 0
                for data in chunks(files.folder, info):
                    sha.update(data)
                    found += nonfinite(data, info.dtype)
                if found:
                    bad[name] = found
                bar.update()
            digests[shard] = sha.hexdigest()
    if bad:
        worst = ", ".join(f"{name} ({found} of {files.tensors[name].numel})" for name, found in list(bad.items())[:3])
        raise CheckpointError(
            f"{files.name}: {len(bad)} tensors hold NaN or Inf weights: {worst}",
            expected="finite weights",
            fix="download the checkpoint again, or use an earlier training checkpoint",
        )
    return digests


def same_tensors(ours: CheckpointFiles, theirs: CheckpointFiles, names: list[str], bar: Bar) -> list[str]:
    """Which of the tensors `names` differ in dtype, shape or any bit. Shards that are one file on disk are not read.

    Args:
        ours: the checkpoint looked at.
        theirs: what it is compared with; lacking tensors count as different.
        names: tensors of `ours`.
        bar: moved by one per tensor.
    """
    same_file = {
        (a, b): (ours.folder / a).samefile(theirs.folder / b) for a in ours.shard_bytes for b in theirs.shard_bytes
    }
    different = []
    for name in names:
        info, other = ours.tensors[name], theirs.tensors.get(name)
        if other is None or (info.dtype, info.shape) != (other.dtype, other.shape):
            different.append(name)
        elif not (same_file[info.shard, other.shard] and info.start == other.start):
            pairs = zip(chunks(ours.folder, info), chunks(theirs.folder, other), strict=True)
            if any(not torch.equal(_raw(a), _raw(b)) for a, b in pairs):
                different.append(name)
        bar.update()
    return different


def _raw(data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
