"""A whole checkpoint of a small one and its teacher."""

import dataclasses as dc
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from sse_convert.checkpoints import provenance
from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files, stays_inside
from sse_convert.checkpoints.manifest import write_manifest
from sse_convert.checkpoints.open import CONFIG, CheckpointFiles, download, open_checkpoint
from sse_convert.checkpoints.output_folder import check_output, check_space, new_folder
from sse_convert.checkpoints.safetensors_io import TensorInfo, read_header
from sse_convert.errors import CheckpointError
from sse_convert.evaluation.report import EVALUATION_FILE
from sse_convert.export.card import CARD, small_note
from sse_convert.export.shards import SHARD_BYTES, assigned, write_weights
from sse_convert.modeling.arch_spec import LENT_FILE
from sse_convert.modeling.configuration import whole_entry
from sse_convert.modeling.loading import Lent, read_lent, teacher_files
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.report import FieldsReport, format_bytes
from sse_convert.results.collect import RECIPE


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class JoinReport(FieldsReport):
    """A checkpoint that was made whole."""

    out: Path
    """the folder"""
    own: int
    """tensors of the small checkpoint"""
    lent: int
    """tensors of the teacher"""
    teacher: str
    """with its revision"""
    shards: dict[str, int]
    """shard to bytes"""

    def lines(self) -> list[str]:
        """The result for a person."""
        size = format_bytes(sum(self.shards.values()))
        return [
            f"wrote {self.out}: {self.own} tensors of its own and {self.lent} of {self.teacher}, {size}",
            f"next: sse-convert verify {shlex.quote(str(self.out))}",
        ]


def join_checkpoint(checkpoint: str | Path, out: Path, teacher: Path | None = None) -> JoinReport:
    """Write the whole checkpoint. Arguments and errors as of `api.join`."""
    check_output(out)
    files = download(open_checkpoint(checkpoint))
    if not files.small:
        raise CheckpointError(
            f"{checkpoint} is no small checkpoint",
            expected="one that was exported with --delta or export.delta",
            fix="use it as it is: it holds all of its tensors",
        )
    lent = read_lent(files.folder / LENT_FILE)
    theirs = teacher_files(lent, str(checkpoint), None if teacher is None else str(teacher), {})
    whole = _joined(files, lent, theirs)
    dtypes = {name: info.dtype for name, info in whole.tensors.items()}
    shards = assigned(whole.tensors, dtypes, SHARD_BYTES)
    with new_folder(out) as folder:
        check_space(out, sum(info.nbytes for info in whole.tensors.values()))
        records = write_weights(whole, folder, shards, dtypes)
        _copy_rest(files, folder, lent)
        write_manifest(folder, records)
    return JoinReport(
        out=out,
        own=len(files.tensors),
        lent=len(whole.tensors) - len(files.tensors),
        teacher=lent.named,
        shards={name: (out / name).stat().st_size for name in shards},
    )


def _joined(files: CheckpointFiles, lent: Lent, theirs: dict[str, str]) -> CheckpointFiles:
    """The tensors of both, each in the file where it lies."""

    def at(path: Path, info: TensorInfo) -> TensorInfo:
        return dc.replace(info, shard=str(path.absolute()))

    tensors: dict[str, TensorInfo] = {}
    for name, path in theirs.items():
        there = read_header(Path(path))
        tensors |= {tensor: at(Path(path), there[tensor]) for tensor in lent.files[name]}
    tensors |= {name: at(files.folder / info.shard, info) for name, info in files.tensors.items()}
    return dc.replace(files, tensors=tensors)


def _copy_rest(files: CheckpointFiles, folder: Path, lent: Lent) -> None:
    """All that an export writes beside weights, as of a whole checkpoint."""
    config: dict[str, Any] = {**files.config, "sse": whole_entry(files.config["sse"])}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_remote_code(folder)
    copy_auxiliary_files(files.folder, folder)
    for name in (RECIPE, EVALUATION_FILE, provenance.FILE, CARD):
        if (files.folder / name).is_file() and stays_inside(files.folder / name, files.folder):
            shutil.copyfile(files.folder / name, folder / name)
    if (folder / CARD).is_file():
        card = (folder / CARD).read_text(encoding="utf-8")
        (folder / CARD).write_text(card.replace(f"{small_note(lent)}\n\n", ""), encoding="utf-8")
