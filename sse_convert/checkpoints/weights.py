"""Weights of whole checkpoints: their index; streamed: hash, compare, look for NaN and Inf."""

import dataclasses as dc
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from sse_convert.checkpoints.open import INDEX, CheckpointFiles
from sse_convert.checkpoints.safetensors_io import read_header
from sse_convert.checkpoints.tensor_data import all_finite, nonfinite, tensor_chunks
from sse_convert.console import Bar, progress
from sse_convert.errors import CheckpointError
from sse_convert.report import counted


@dc.dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over all weights found."""

    digests: dict[str, str]
    """SHA-256 of each shard"""
    nonfinite: dict[str, int]
    """tensor -> elements that are NaN or infinite, where there are any"""


def write_index(folder: Path, shards: list[str]) -> None:
    """Write `model.safetensors.index.json` from the headers of the given shards."""
    tensors = [info for shard in shards for info in read_header(folder / shard).items()]
    index = {
        "metadata": {"total_size": sum(info.nbytes for _, info in tensors)},
        "weight_map": {name: info.shard for name, info in sorted(tensors)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def scan_weights(files: CheckpointFiles) -> Scan:
    """Stream every shard once, in pieces: hash it and look for NaN and Inf.

    Raises:
        CheckpointError: a shard became shorter while it was read.
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
                for data in tensor_chunks(files.folder, info):
                    sha.update(data)
                    found += nonfinite(data, info.dtype)
                if found:
                    bad[name] = found
                bar.update()
            digests[shard] = sha.hexdigest()
    return Scan(digests, bad)


def check_weights(files: CheckpointFiles, scan: Scan | None = None) -> dict[str, str]:
    """Make sure that all weights are finite.

    Args:
        files: the checkpoint.
        scan: of the checkpoint, if there is one already.

    Returns:
        SHA-256 of each shard.

    Raises:
        CheckpointError: some weights are NaN or infinite.
    """
    scan = scan or scan_weights(files)
    if bad := scan.nonfinite:
        worst = ", ".join(f"{name} ({found} of {files.tensors[name].numel})" for name, found in list(bad.items())[:3])
        raise CheckpointError(
            f"{files.name}: {counted(len(bad), 'tensor')} with NaN or Inf weights: {worst}",
            expected="finite weights",
            fix="download the checkpoint again, or use an earlier training checkpoint",
        )
    return scan.digests


def nonfinite_tensors(module: nn.Module) -> list[str]:
    """Names of a module's weights and buffers that hold NaN or Inf; of sharded ones, those where this process's do."""
    found = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if own.is_floating_point() and not all_finite(own.detach()):
            found.append(name)
    return found


def require_finite(model: nn.Module, name: str | Path) -> None:
    """Make sure that a model can be trained, or trained from.

    Raises:
        CheckpointError: some weights are NaN or infinite.
    """
    if bad := nonfinite_tensors(model):
        raise CheckpointError(
            f"{name}: {counted(len(bad), 'tensor')} with NaN or Inf weights: {some(bad)}",
            expected="finite weights",
            fix="download the checkpoint again, or use an earlier one",
        )


def some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
            pairs = zip(tensor_chunks(ours.folder, info), tensor_chunks(theirs.folder, other), strict=True)
            if any(not torch.equal(_raw(a), _raw(b)) for a, b in pairs):
                different.append(name)
        bar.update()
    return different


def _raw(data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
