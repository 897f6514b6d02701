"""A quantised checkpoint as a bfloat16 one, tensor by tensor: float8 weights with scales, and mxfp4 experts.

float8: `X` of F8_E4M3 beside `X_scale_inv`, one float per block of its last two dims, per row, or in all:
    W = X * scale
mxfp4: `X_blocks` [..., rows, groups, 16], two 4-bit numbers in a byte, beside `X_scales`, one exponent per group.

Everything else is copied as it is. What only quantised products need, such as scales of activations, is left out.
GGUF files are read elsewhere (`gguf`).
"""

import dataclasses as dc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files, without_code_keys
from sse_convert.checkpoints.open import CONFIG, SINGLE, CheckpointFiles, download, open_checkpoint, source_path
from sse_convert.checkpoints.output_folder import check_output, check_space, new_folder
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES, Layout, write_shard
from sse_convert.checkpoints.teacher import DEQUANTISED, quantised, quantization_method
from sse_convert.checkpoints.tensor_data import named_chunks, read_tensor, tensor_bytes
from sse_convert.checkpoints.weights import write_index
from sse_convert.compat import mxfp4_weights
from sse_convert.console import progress
from sse_convert.errors import CheckpointError
from sse_convert.report import FieldsReport, format_bytes
from sse_convert.surgery.convert import layout_bytes
from sse_convert.surgery.gguf import is_gguf, write_gguf

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
"""what follows a weight's name"""
UNUSED = ("activation_scale", "input_scale")
"""last parts of the names of tensors that only quantised products need"""
FLOAT8 = "F8_E4M3"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class DequantizeReport(FieldsReport):
    """The result of undoing a quantisation."""

    out: Path
    method: str
    """the quantisation that was undone"""
    dequantised_tensors: int
    bytes: int
    """of all tensors in the new folder"""
    source_sha256: str | None = None
    """of the GGUF file that was read"""

    def lines(self) -> list[str]:
        """The result for a person."""
        source = [f"dequantised from a {self.method} file of sha256 {self.source_sha256}"] if self.source_sha256 else []
        return [
            f"wrote {self.out}: {self.dequantised_tensors} {self.method} tensors as bfloat16, "
            f"{format_bytes(self.bytes)} in all",
            *source,
            f"next: set `model: {self.out}` in the recipe",
        ]


def dequantize_checkpoint(model: Path | str, out: Path, *, revision: str | None = None) -> DequantizeReport:
    """Write a checkpoint's weights as bfloat16 into a new folder. Arguments and errors as of `api.dequantize`."""
    check_output(out)
    if is_gguf(path := source_path(model)):
        sha256, count, written = write_gguf(path, out)
        return DequantizeReport(out=out, method="GGUF", dequantised_tensors=count, bytes=written, source_sha256=sha256)
    files = open_checkpoint(model, revision)
    method = quantization_method(files)
    if method is None:
        raise CheckpointError(
            f"{files.name} is not quantised",
            expected="a checkpoint with quantization_config in config.json",
            fix="use it as it is",
        )
    if method not in DEQUANTISED:
        raise quantised(files, method)
    files = download(files)
    layouts = {shard: _layout(files, shard) for shard in files.shard_bytes}
    needed = sum(map(layout_bytes, layouts.values()))
    with new_folder(out) as folder, progress("dequantising", sum(map(len, layouts.values()))) as bar:
        check_space(out, needed)
        for shard, layout in layouts.items():
            write_shard(folder / shard, layout, _data(files, layout))
            bar.update(len(layout))
        if list(layouts) != [SINGLE]:
            write_index(folder, list(layouts))
        dropped = {"quantization_config", "torch_dtype"}
        config = {key: value for key, value in without_code_keys(files.config).items() if key not in dropped}
        (folder / CONFIG).write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n", encoding="utf-8")
        copy_auxiliary_files(files.folder, folder)
    kept = [name for layout in layouts.values() for name in layout if name in files.tensors]
    undone = sum(map(len, layouts.values())) - sum(files.tensors[name].dtype != FLOAT8 for name in kept)
    return DequantizeReport(out=out, method=method, dequantised_tensors=undone, bytes=needed)


def _layout(files: CheckpointFiles, shard: str) -> Layout:
    """Name -> (dtype, shape) of what becomes of a shard's tensors.

    Raises:
        CheckpointError: a tensor is of a form that is not known.
    """
    found: Layout = {}
    for name, info in files.tensors.items():
        if info.shard != shard or _is_beside(files, name):
            continue
        if _is_mxfp4(files, name):
            experts, rows, groups, packed = info.shape
            found[name.removesuffix(BLOCKS)] = "BF16", (experts, groups * packed * 2, rows)
        elif info.dtype == FLOAT8 and name + SCALE in files.tensors:
            found[name] = "BF16", info.shape
        elif info.dtype in FLOAT_DTYPES:
            found[name] = info.dtype, info.shape
        else:
            raise CheckpointError(
                f"tensor {name} of {files.name} is {info.dtype} and has no scale of a known form",
                expected=f"{FLOAT8} beside {name + SCALE}, or blocks of mxfp4 beside their scales",
                fix="convert the original, unquantised model",
            )
    return found


def _is_mxfp4(files: CheckpointFiles, name: str) -> bool:
    """Whether a tensor holds the blocks of a weight."""
    weight = name.removesuffix(BLOCKS)
    blocks, scales = files.tensors[name], files.tensors.get(weight + SCALES)
    if scales is None or not name.endswith(BLOCKS) or weight in files.tensors:
        return False
    return (blocks.dtype, scales.dtype) == ("U8", "U8") and len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape


def _is_beside(files: CheckpointFiles, name: str) -> bool:
    """Whether a tensor only says how another one is quantised."""
    return (
        (name.endswith(SCALE) and name.removesuffix(SCALE) in files.tensors)
        or (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in files.tensors)
        or name.rpartition(".")[2] in UNUSED
    )


def _data(files: CheckpointFiles, layout: Layout) -> Iterator[tuple[str, bytes | memoryview]]:
    """What `write_shard` takes, one tensor in memory at a time."""
    for name in layout:
        info = files.tensors.get(name)
        if info is None:
            blocks, scales = (read_tensor(files.folder, files.tensors[name + end]) for end in (BLOCKS, SCALES))
            yield name, tensor_bytes(mxfp4_weights(blocks, scales))
        elif info.dtype == FLOAT8:
            weight, scale = (read_tensor(files.folder, files.tensors[name + end]) for end in ("", SCALE))
            yield name, tensor_bytes(unscaled(weight, scale, _block(files.config), name))
        else:
            yield from named_chunks(files.folder, name, info)


def _block(config: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None where a scale is for rows, or for all."""
    scheme = config["quantization_config"]
    given = scheme.get("weight_block_size") if isinstance(scheme, dict) else None
    if given is None:
        return None
    if not (isinstance(given, list) and len(given) == 2 and all(type(size) is int and size > 0 for size in given)):
        raise CheckpointError(
            f"quantization_config.weight_block_size is {given!r}",
            expected="rows and columns of a block, such as [128, 128], or null",
            fix="correct config.json, or download it again",
        )
    return given[0], given[1]


def unscaled(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, name: str) -> Tensor:
    """A float8 weight times its scales, in bfloat16; computed in float32, a block of rows at a time.

    Args:
        weight: [..., rows, columns], or of any shape where one scale is for all.
        scale: of each block [..., blocks of rows, blocks of columns], the last ones being partial; of each row
            [..., rows, 1]; or one number.
        block: rows and columns of a block, if there are blocks.
        name: of the weight, for messages.

    Raises:
        CheckpointError: the scale has another shape.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return (weight.float() * scale.reshape(())).bfloat16()
    *outer, rows, columns = weight.shape
    height, width = block or (1, columns)
    expected = (*outer, -(-rows // height), -(-columns // width))
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{name}{SCALE} has shape {list(scale.shape)} for a weight of {list(weight.shape)}",
            expected=f"{list(expected)}, by quantization_config.weight_block_size in config.json",
            fix="correct config.json, or download the checkpoint again",
        )
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(expected[-2]):
        part = slice(i * height, (i + 1) * height)
        factors = scale[..., i : i + 1, :].repeat_interleave(width, -1)[..., :columns]
        out[..., part, :] = weight[..., part, :].float() * factors
    return out
