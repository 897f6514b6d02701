"""Tensor data of shards: dtypes, bytes, and reading in pieces of bounded size."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sse_convert.checkpoints.safetensors_io import ITEM_BYTES, TensorInfo
from sse_convert.errors import CheckpointError

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


def tensor_chunks(folder: Path, info: TensorInfo) -> Iterator[memoryview]:
    """The data of one tensor in pieces of at most 32 MiB, each a whole number of elements; valid until the next one.

    Raises:
        CheckpointError: see `file_pieces`.
    """
    return file_pieces(folder / info.shard, info.start, info.nbytes)


def file_pieces(path: Path, start: int, length: int) -> Iterator[memoryview]:
    """A part of a file in pieces of 32 MiB, the last one shorter; each is valid until the next one.

    Raises:
        CheckpointError: the file became shorter while it was read.
    """
    buffer = memoryview(bytearray(min(length, CHUNK_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length:
            piece = buffer[: min(length, CHUNK_BYTES)]
            filled = 0
            while filled < len(piece):
                count = file.readinto(piece[filled:])
                if not count:
                    raise CheckpointError(f"{path} ended while it was read", fix="do not change it meanwhile")
                filled += count
            length -= len(piece)
            yield piece


def named_chunks(
    folder: Path, name: str, info: TensorInfo, dtype: str | None = None
) -> Iterator[tuple[str, bytes | memoryview]]:
    """A stored tensor as `write_shard` takes it, piece by piece, in another dtype if one is given.

    Raises:
        CheckpointError: see `file_pieces`.
    """
    if not info.nbytes:
        yield name, b""
    for data in tensor_chunks(folder, info):
        yield name, data if dtype in (None, info.dtype) else _converted(data, info.dtype, str(dtype))


def _converted(data: memoryview, dtype: str, target: str) -> memoryview:
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).to(TORCH_DTYPES[target])
    return values.view(torch.uint8).numpy().data


def nonfinite(data: memoryview, dtype: str) -> int:
    """How many of the elements in `data` are NaN or infinite."""
    if not TORCH_DTYPES[dtype].is_floating_point:
        return 0
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])
    values = values.float() if ITEM_BYTES[dtype] == 1 else values
    return 0 if all_finite(values) else values.numel() - int(values.isfinite().sum())


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite: a twentieth of the time, and none of the memory, of looking at each."""
    return not values.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(values))  # NaN propagates
