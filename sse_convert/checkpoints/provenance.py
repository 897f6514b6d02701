"""`sse_convert.json`: where a checkpoint comes from, written beside config.json in every folder the tool makes."""

import dataclasses as dc
from pathlib import Path
from typing import Any

from sse_convert import __version__
from sse_convert.checkpoints.foreign import parse_json
from sse_convert.errors import CheckpointError
from sse_convert.files import write_json

FILE = "sse_convert.json"
FORMAT = 1
EXPORT = "export"
UNTRAINED = ("convert", "calibrate")
"""stages after which the teacher's tensors are still what they were, to the bit"""
_TYPES = {"recipe_hash": str | None, "teacher_revision": str | None}
"""of fields that are no plain text"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class TeacherShard:
    """A shard of the teacher as it was linked or copied."""

    source: str
    """file name in the teacher's folder"""
    bytes: int


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
    manifest: bool = False
    """whether the folder was made with a manifest; folders of older versions were not"""
    exported: str = ""
    """what wrote the checkpoint that was exported; empty in other folders and in exports of older versions"""

    def took_place(self, stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The recipe's stages that took place: up to the one that wrote the weights, none where that is no stage of the
        recipe; all in exports of older versions.

        Args:
            stages: of the resolved recipe.
        """
        written = self.exported or self.stage
        if written == EXPORT:
            return stages
        last = next((i for i, stage in enumerate(stages) if stage["name"] == written), -1)
        return stages[: last + 1]

    def write(self, folder: Path) -> None:
        """Write the file into a folder that gets a manifest next, replacing an earlier one."""
        write_json(folder / FILE, {"format": FORMAT, **dc.asdict(dc.replace(self, manifest=True))}, indent=2)


def read_provenance(folder: Path) -> Provenance | None:
    """The provenance of a checkpoint folder; None where the file is missing.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError("unknown format")
        placed = data.pop("shards")
        shards = {name: TeacherShard(source=shard["source"], bytes=shard["bytes"]) for name, shard in placed.items()}
        if type(manifest := data.pop("manifest", False)) is not bool:
            raise ValueError("manifest is neither true nor false")
        if odd := [name for name, value in data.items() if not isinstance(value, _TYPES.get(name, str))]:
            raise ValueError(f"{odd[0]} is no text")
        return Provenance(shards=shards, manifest=manifest, **data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            expected=f"format {FORMAT}, as written by sse-convert",
            fix="convert the model again, or upgrade sse-convert",
        ) from error
