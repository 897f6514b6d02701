import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sse_convert.checkpoints.safetensors_io import MAX_HEADER_BYTES, read_header, write_shard
from sse_convert.checkpoints.tensor_data import DTYPE_NAMES, read_tensor, tensor_bytes
from sse_convert.errors import CheckpointError


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 3, generator=generator),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 7),
        "ids": torch.arange(6).reshape(2, 3),
    }


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_header_agrees_with_the_library(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert header.keys() == tensors.keys()
    for name, info in header.items():
        assert info.shape == tuple(tensors[name].shape)
        assert torch.equal(read_tensor(tmp_path, info), tensors[name])


def test_written_shard_is_read_by_the_library(tmp_path):
    tensors = some_tensors()
    layout = {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    write_shard(tmp_path / "b.safetensors", layout, ((name, tensor_bytes(t)) for name, t in tensors.items()))
    loaded = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert safe_open(tmp_path / "b.safetensors", "pt").metadata() == {"format": "pt"}
    assert all(
        info.start % 8 == 0 for name, info in read_header(tmp_path / "b.safetensors").items() if name == "matrix"
    )


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors is missing"):
        read_header(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [3, 8, 60, -1])
def test_truncated(tmp_path, keep):
    path = tmp_path / "cut.safetensors"
    save_file({"w": torch.zeros(16)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors is truncated: \d+ bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff" * 64, "claims a header of 18446744073709551615 bytes"),
        (raw(b"not json"), "the header is not JSON"),
        (raw([1]), "not a JSON object"),
        (raw(b"[" * 100_000), "the header is not JSON"),
        (raw(b'{"w": 1, "w": 1}'), "a name occurs twice"),
        (raw(b'{"\\ud800": 1}'), "the header is not JSON .*surrogates not allowed"),
        (raw(b'{"w": ' + b"9" * 5000 + b"}"), "the header is not JSON"),
        (raw({"__metadata__": {"format": 1}}), "__metadata__ is not a JSON object of texts"),
        (raw({"__metadata__": []}), "__metadata__ is not a JSON object of texts"),
        (raw({"w": {"dtype": "F32"}}), "tensor w lacks dtype, shape or data_offsets"),
        (raw({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"), r"dtype \['F32'\]"),
        (raw({"w": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}), r"shape \[0, 9223372036854775808"),
        (raw({"w": {"dtype": "F32", "shape": [0, 2**62, 2], "data_offsets": [0, 0]}}), r"shape \[0, 46"),
        (raw({"w": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, b"1234"), r"shape \[1, 1.*\.\.\. and"),
        (raw({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"), r"shape \[1\.0\]"),
        (raw({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"), r"shape \[True\]"),
        (raw({"w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "dtype 'F3'"),
        (raw({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), r"shape \[-1\]"),
        (raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234"), r"data_offsets \[0\]"),
        (raw({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "bytes 0 to 4, expected 0 to 8"),
        (raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "expected 0 to 4"),
        (
            raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
            "1 bytes follow the last tensor",
        ),
    ],
)
def test_garbage(tmp_path, content, why):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors is not a valid safetensors file: .*{why}"):
        read_header(path)


def test_a_long_header_is_not_read(tmp_path):
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    with pytest.raises(CheckpointError, match="claims a header of 25000001 bytes"):
        read_header(path)


def test_interrupted_write_reports_what_is_missing(tmp_path):
    with pytest.raises(AssertionError, match="fewer tensors"):
        write_shard(tmp_path / "c.safetensors", {"w": ("F32", (1,))}, iter(()))
