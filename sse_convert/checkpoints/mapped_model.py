"""A converted model whose weights stay on disk, for one forward pass in little memory, whatever the model's size.

Weights are maps of the shards: an operation brings in the pages that it reads, and they are dropped after it.
"""

import contextlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from sse_convert.checkpoints.meta_model import model_shapes, unfilled_model
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.safetensors_io import TensorInfo
from sse_convert.checkpoints.teacher import source_view
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES, read_tensor
from sse_convert.modeling.auto import load_pretrained

PIECE_BYTES = 1 << 26
"""rows of a weight that a linear map multiplies at once; pages are dropped when as many bytes were read"""
_MOST_PARTS = 2
"""tensors that an expert's matrix is stored as: gate and up"""
_DROP = getattr(mmap, "MADV_DONTNEED", None)


@contextlib.contextmanager
def mapped_model(files: CheckpointFiles, config: Any) -> Iterator[PreTrainedModel]:
    """The model in evaluation mode; inside, its operations read weights from disk. Not for training or saving.

    Experts that are stored one by one are put together when one of them is used, instead of all on loading.
    A model of which transformers merges other tensors is loaded whole.

    Args:
        files: a converted checkpoint that holds every tensor of its model.
        config: the transformers configuration of it.

    Raises:
        CheckpointError: the model cannot be loaded.
    """
    model = unfilled_model(config)
    model.tie_weights()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # one expert after the other
    if (parts := _stored_parts(files, model)) is None:
        yield load_pretrained(files.folder)
        return
    with _Maps(files.folder, model.dtype) as maps, torch.no_grad():
        tensors = {name: maps.tensor(files.tensors[part[0][0]]) for name, part in parts.items() if len(part) == 1}
        model.load_state_dict(tensors, strict=False, assign=True)
        for name in parts.keys() - tensors.keys():
            maps.merge(model.get_parameter(name), [[files.tensors[part] for part in row] for row in parts[name]])
        model.tie_weights()
        yield model.eval()


def _stored_parts(files: CheckpointFiles, model: PreTrainedModel) -> dict[str, list[list[str]]] | None:
    """What the checkpoint stores for each tensor of its model: one name, or for each expert the names of its parts, one
    below the other. None where several tensors become one in another way."""
    view, found = source_view(files), {}
    for name, shape in model_shapes(model).items():
        parts = [[view.stored(name)]]
        if parts[0][0] not in files.tensors:  # transformers renames some on loading (GPT-NeoX's head, for one)
            parts = [[view.stored(part) for part in row] for row in _saved_parts(model, name, shape)]
        if not parts or any(part not in files.tensors for row in parts for part in row):
            return None
        found[name] = parts
    return found


def _saved_parts(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> list[list[str]]:
    """What transformers makes of a tensor on saving, as in `_stored_parts`; empty where it does something else.

    It is shown numbered rows in place of the tensor, and where they end up says what it does.
    """
    rows, numbered = 2 * _MOST_PARTS, torch.empty(shape, device="meta")
    if len(shape) == 3:
        numbered = torch.arange(shape[0] * rows).view(-1, rows, 1)
    saved = revert_weight_conversion(model, {name: numbered})
    if len(saved) == 1 or len(shape) != 3:
        return [list(saved)] if [tensor.shape for tensor in saved.values()] == [numbered.shape] else []
    experts = shape[0]
    parts: list[list[str]] = [[] for _ in range(experts)]
    for part, numbers in sorted(saved.items(), key=lambda item: int(item[1].min())):
        if numbers.shape != (rows * experts // len(saved), 1):
            return []
        parts[int(numbers[0]) // rows].append(part)
    return parts


class _Maps(TorchFunctionMode):
    """Maps of shards. While it is entered, large products are computed in pieces and pages that were read dropped.

    Args:
        folder: of the shards.
        dtype: of the model. Matrices may have a lower one, as a finished stage stores what it did not train.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self._folder, self._dtype = folder, dtype
        self._shards: dict[str, mmap.mmap] = {}
        self._ours: set[int] = set()
        self._experts: dict[int, list[list[TensorInfo]]] = {}
        self._read = 0

    def tensor(self, info: TensorInfo) -> Tensor:
        """A weight as a map of its part of the shard; loaded where maps are not aligned to its elements."""
        dtype = TORCH_DTYPES[info.dtype]
        if not info.nbytes or info.start % dtype.itemsize:
            return read_tensor(self._folder, info)
        if info.shard not in self._shards:
            with (self._folder / info.shard).open("rb") as file:
                self._shards[info.shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(self._shards[info.shard], dtype=dtype, count=info.numel, offset=info.start)
        self._ours.add(whole.untyped_storage().data_ptr())
        return whole.reshape(info.shape)

    def merge(self, experts: Tensor, parts: list[list[TensorInfo]]) -> None:
        """Let a tensor of all experts, which stays without data, give each of them from its parts."""
        self._experts[id(experts)] = parts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what is asked for, then forget what it read."""
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and id(args[0]) in self._experts:
            return self._expert(self._experts[id(args[0])][int(args[1])])
        if func is F.linear and (self._is_large(args[1]) or args[1].dtype != args[0].dtype):
            return self._linear(*args, **kwargs)
        result = func(*args, **kwargs)
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self._drop_after(sum(x.nbytes for x in given if self._is_ours(x)))
        return result

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = max(1, PIECE_BYTES // weight[0].nbytes)
        pieces = []
        for start in range(0, len(weight), rows):
            part = slice(start, start + rows)
            pieces.append(F.linear(x, weight[part].to(x.dtype), None if bias is None else bias[part]))
            self._drop_after(PIECE_BYTES)
        return torch.cat(pieces, -1)

    def _expert(self, parts: list[TensorInfo]) -> Tensor:
        whole = torch.cat([self.tensor(info) for info in parts])
        self._drop_after(whole.nbytes)
        return whole.to(self._dtype)

    def _is_ours(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and x.untyped_storage().data_ptr() in self._ours

    def _is_large(self, x: Tensor) -> bool:
        return x.nbytes > PIECE_BYTES and self._is_ours(x)

    def _drop_after(self, read: int) -> None:
        """Drop the pages when, with these bytes, enough were read."""
        self._read += read
        if self._read >= PIECE_BYTES and _DROP is not None:
            for shard in self._shards.values():
                shard.madvise(_DROP)
            self._read = 0
