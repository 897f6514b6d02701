"""The safetensors format by hand: read and check headers without touching data, write a shard one tensor at a time.

A file is an 8-byte little-endian header length, a JSON header (tensor name -> dtype, shape, data_offsets, plus an
optional `__metadata__`), then the data without holes. Source: the safetensors README, section Format. No torch here.
"""

import dataclasses as dc
import hashlib
import json
import math
import struct
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from sse_convert.errors import CheckpointError

ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8},
}
"""bytes per element of each known dtype"""
FLOAT_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""safetensors name -> torch name of the dtypes a model's weights may have"""
MAX_HEADER_BYTES = 25_000_000
"""of a shard: what huggingface_hub reads too, and a hundred times that of the largest known model"""
MAX_DIMENSIONS = 64
"""of a tensor, as in torch"""
MAX_ELEMENTS = 2**63 - 1
"""of a tensor: what torch can count"""
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""tensor name -> (safetensors dtype, shape), in the order in which a shard stores them"""
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_REDOWNLOAD = "download or copy this file again"


@dc.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its shard's header describes it."""

    dtype: str
    """safetensors dtype, for example BF16"""
    shape: tuple[int, ...]
    """dimensions"""
    shard: str
    """file name inside the checkpoint folder"""
    start: int
    """first byte of the data, counted from the start of the file"""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.numel * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard, from its header alone.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is not a valid safetensors header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                raise _truncated(path, size, _LENGTH.size)
            length = _LENGTH.unpack(prefix)[0]
            if length > MAX_HEADER_BYTES:
                raise _garbage(path, f"it claims a header of {length} bytes")
            if _LENGTH.size + length > size:
                raise _truncated(path, size, _LENGTH.size + length)
            text = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"shard {path} is missing", expected="every shard of the checkpoint", fix=_REDOWNLOAD
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"shard {path} cannot be read: {error.strerror}", fix="check the file's permissions"
        ) from error
    return parse_header(text, path, size)


def parse_header(text: bytes, path: Path, size: int) -> dict[str, TensorInfo]:
    """Parse and check the JSON header `text` of the shard `path`, which is `size` bytes long.

    Raises:
        CheckpointError: see `read_header`.
    """
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _garbage(path, f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _garbage(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _garbage(path, "__metadata__ is not a JSON object of texts")
    return checked_tensors(path, header, _LENGTH.size + len(text), size)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are distinct and can be written."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    for name in found:
        name.encode()  # a lone surrogate is no text
    return found


def checked_tensors(path: Path, header: dict[str, Any], data_start: int, size: int) -> dict[str, TensorInfo]:
    """The tensors of a parsed header, once their data is known to fill the file without holes.

    Args:
        path: the shard.
        header: tensor name -> dtype, shape and data_offsets, as JSON has them.
        data_start: byte of the file at which data begins.
        size: bytes of the file.

    Raises:
        CheckpointError: see `read_header`.
    """
    tensors, end = {}, 0
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    for name, (dtype, shape, first, last) in sorted(entries.items(), key=lambda item: item[1][2:]):
        info = TensorInfo(dtype, shape, path.name, data_start + first)
        if first != end or last - first != info.nbytes:
            raise _garbage(
                path, f"tensor {name} lies at bytes {first} to {last}, expected {end} to {end + info.nbytes}"
            )
        tensors[name], end = info, last
    if size < data_start + end:
        raise _truncated(path, size, data_start + end)
    if size > data_start + end:
        raise _garbage(path, f"{size - data_start - end} bytes follow the last tensor")
    return {name: tensors[name] for name in entries}


def _entry(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and data offsets of one header entry, checked for form."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _garbage(path, f"tensor {name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _garbage(path, f"tensor {name} has dtype {_short(dtype)}, expected one of {', '.join(ITEM_BYTES)}")
    fit = _are_counts(shape, MAX_DIMENSIONS) and math.prod(n or 1 for n in shape) <= MAX_ELEMENTS
    if not fit or not _are_counts(offsets, 2) or len(offsets) != 2:
        raise _garbage(path, f"tensor {name} has shape {_short(shape)} and data_offsets {_short(offsets)}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_counts(value: Any, most: int) -> bool:
    """Whether this is a list of at most `most` integers that are not negative and that torch can count to."""
    return (
        isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _truncated(path: Path, size: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"shard {path} is truncated: {size} bytes", expected=f"at least {expected} bytes", fix=_REDOWNLOAD
    )


def _garbage(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"shard {path} is not a valid safetensors file: {why}", fix=_REDOWNLOAD)


def header_bytes(layout: Layout) -> bytes:
    """Length prefix and padded JSON header of a shard that holds `layout` (name -> dtype, shape) in that order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def write_shard(path: Path, layout: Layout, tensors: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """Write a shard from tensors that arrive one by one, so that only one, or a piece of one, is in memory at a time.

    Args:
        path: the file to create.
        layout: name -> (safetensors dtype, shape) of every tensor, in the order in which `tensors` brings them.
        tensors: names and little-endian bytes; a tensor may come in several pieces, one after the other.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    announced = iter(layout.items())
    header = header_bytes(layout)
    sha = hashlib.sha256(header)
    with path.open("xb") as file:
        file.write(header)
        for name, pieces in groupby(tensors, key=itemgetter(0)):
            expected, (dtype, shape) = next(announced, ("nothing", ("U8", (0,))))
            assert name == expected, f"tensor {name} arrived where {expected} was announced"
            left = math.prod(shape) * ITEM_BYTES[dtype]
            for _, data in pieces:
                sha.update(data)
                left -= file.write(data)
            assert not left, f"{name} lacks {left} bytes of {dtype} {shape}"
    assert next(announced, None) is None, "fewer tensors arrived than were announced"
    return sha.hexdigest()
