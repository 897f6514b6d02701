"""`sse_convert.json`: where a checkpoint comes from, written beside config.json in every folder the tool makes."""

import dataclasses as dc
import json
from pathlib import Path
from typing import Any

from sse_convert import __version__
from sse_convert.errors import CheckpointError
from sse_convert.files import write_json

FILE = "sse_convert.json"
FORMAT = 1
UNTRAINED = ("convert", "calibrate")
"""stages after which the teacher's tensors are still what they were, to the bit"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class TeacherShard:
    """A shard of the teacher as it was linked or copied."""

    source: str
    """file name in the teacher's folder"""
    bytes: int
    header_sha256: str
    """of the length prefix and header: names, shapes, dtypes and offsets"""
    sha256: str | None = None
    """of the whole file, where it was streamed (`--check`)"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Content of `sse_convert.json`."""

    stage: str
    """what wrote the folder: convert, calibrate, a training stage's name, or export"""
    recipe_hash: str | None
    teacher: str
    """hub id or folder, as in the recipe"""
    teacher_folder: str
    """absolute path of the teacher's files when the folder was made; empty in an exported folder"""
    teacher_revision: str | None
    shards: dict[str, TeacherShard]
    """file name in this folder -> the teacher's shard"""
    tool_version: str = __version__

    def write(self, folder: Path) -> None:
        """Write the file, replacing an earlier one."""
        write_json(folder / FILE, {"format": FORMAT, **dc.asdict(self)}, indent=2)


def read_provenance(folder: Path) -> Provenance | None:
    """The provenance of a checkpoint folder; None where the file is missing.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError("unknown format")
        shards = {name: TeacherShard(**shard) for name, shard in data.pop("shards").items()}
        return Provenance(shards=shards, **data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            expected=f"format {FORMAT}, as written by sse-convert",
            fix="convert the model again, or upgrade sse-convert",
        ) from error
