"""What tells checkpoints apart: hashes of what they were made from, or of what they hold."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sse_convert.errors import CheckpointError
from sse_convert.files import write_json
from sse_convert.report import json_ready

SEAL = "sha256"
"""key of a sealed file that holds the digest of the rest"""
STAGE_FILE = "stage.json"
"""beside a checkpoint: what it was made from"""
_ENDS = 1 << 16
_RECORD = {"inputs", "hash", "report", "tool_version"}


def data_digest(data: Any) -> str:
    """SHA-256 of JSON-ready data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, data: dict[str, Any]) -> None:
    """Write JSON that says itself when it is damaged.

    Raises:
        OutputError: the file cannot be written.
    """
    plain = json.loads(json.dumps(json_ready(data)))
    write_json(path, {**plain, SEAL: data_digest(plain)})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What `write_sealed` wrote; None where there is no such file, or another content."""
    found = _read_object(path)
    return found if found is not None and found.pop(SEAL, None) == data_digest(found) else None


def read_stage_record(folder: Path) -> dict[str, Any]:
    """What a finished step's folder was made from: `inputs`, `hash`, `report`, `tool_version`.

    Raises:
        CheckpointError: the file is damaged. Records of versions that did not seal them are taken as they are.
    """
    path = folder / STAGE_FILE
    record = _read_object(path)
    if record is None or record.keys() - {SEAL} != _RECORD or record.pop(SEAL, None) not in (None, data_digest(record)):
        raise CheckpointError(
            f"{path} is damaged",
            expected="what sse-convert wrote when the step was finished",
            fix=f"restore it from a copy, or delete {folder}: the step is then made again",
        )
    return record


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where the file has none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def checkpoint_identity(source: str | Path, revision: str | None = None) -> str:
    """Identity of a checkpoint.

    Name and revision of a hub id; of a folder that a stage wrote, the hash of all its inputs; of any other folder its
    config.json, and name, size and both ends of each weight file (reading terabytes to start a run would be no help).

    Raises:
        CheckpointError: the record of a stage is damaged.
    """
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{revision}"
    if (folder / STAGE_FILE).is_file():
        return str(read_stage_record(folder)["hash"])
    config = folder / "config.json"
    found = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            found.update(file.read(_ENDS))
    return found.hexdigest()
