"""What tells checkpoints apart: hashes of what they were made from, or of what they hold."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sse_convert.report import json_ready

STAGE_FILE = "stage.json"
"""beside a checkpoint: what it was made from"""
_ENDS = 1 << 16


def data_digest(data: Any) -> str:
    """SHA-256 of JSON-ready data."""
    return hashlib.sha256(json.dumps(json_ready(data), sort_keys=True).encode()).hexdigest()


def checkpoint_identity(source: str | Path, revision: str | None = None) -> str:
    """Identity of a checkpoint.

    Name and revision of a hub id; of a folder that a stage wrote, the hash of all its inputs; of any other folder its
    config.json, and name, size and both ends of each weight file (reading terabytes to start a run would be no help).
    """
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{revision}"
    stage = folder / STAGE_FILE
    if stage.is_file():
        return str(json.loads(stage.read_text(encoding="utf-8"))["hash"])
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
