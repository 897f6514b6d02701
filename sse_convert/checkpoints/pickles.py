"""Pickled checkpoints (`.bin`, `.pt`): opened on request alone, with `weights_only=True`, and stored as safetensors."""

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sse_convert.checkpoints.safetensors_io import TensorInfo, write_shard
from sse_convert.checkpoints.tensor_data import DTYPE_NAMES, tensor_bytes
from sse_convert.errors import CheckpointError


def pickle_headers(paths: list[Path]) -> dict[str, TensorInfo]:
    """Tensors of pickled shards, loaded on the meta device: no data is read into memory.

    Raises:
        CheckpointError: a file is damaged, or holds anything but tensors.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        for name, tensor in _load(path, "meta").items():
            tensors[name] = TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), path.name, 0)
    return tensors


def write_safetensors(paths: list[Path], folder: Path) -> list[str]:
    """Store each pickle file as one safetensors shard in `folder`, tensor by tensor; the new file names.

    Raises:
        CheckpointError: see `pickle_headers`.
        OSError: the disk is full.
    """
    names = [f"model-{i:05d}-of-{len(paths):05d}.safetensors" for i in range(1, len(paths) + 1)]
    for path, name in zip(paths, names, strict=True):
        tensors = _load(path, "cpu")
        layout = {key: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()}
        write_shard(folder / name, layout, _bytes(tensors))
    return names


def _bytes(tensors: dict[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    for name, tensor in tensors.items():
        yield name, tensor_bytes(tensor)


def _load(path: Path, device: str) -> dict[str, Tensor]:
    """The state dict in one file; memory-mapped where the format allows it (zip files, torch >= 1.6)."""
    try:
        data = torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read with weights_only=True: {str(error).splitlines()[0]}",
            expected="a file of plain tensors",
            fix="use a safetensors version of the checkpoint",
        ) from error
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(
            f"{path} holds more than tensors by name",
            expected="a state dict",
            fix="use a safetensors version of the checkpoint",
        )
    return {str(name): tensor for name, tensor in data.items()}
