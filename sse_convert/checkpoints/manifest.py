"""`manifest.json`: size and SHA-256 of every file of a checkpoint folder, written last; `verify` reads it.

The file is written in one form, with a digest of itself, so that a change of any of its bytes shows.
"""

import dataclasses as dc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sse_convert import __version__
from sse_convert.console import Bar, progress
from sse_convert.errors import CheckpointError
from sse_convert.files import digest, write_text

FILE = "manifest.json"
FORMAT = 1
EDITABLE = ("README.md",)
"""files that people are meant to edit: the model card"""
_MB = 1e6


@dc.dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was when its folder was made."""

    bytes: int
    sha256: str | None
    """None where it was deferred"""
    origin: Literal["computed", "hub cache", "deferred"] = "computed"
    """where the digest comes from: the file itself, what the hub says of it, or nowhere yet"""


def write_manifest(folder: Path, known: Mapping[str, FileRecord] | None = None) -> None:
    """Record every file of a finished folder.

    Args:
        folder: the folder; an older manifest in it is replaced.
        known: records that need not be made, by file name; of other files the digest is computed, at disk speed.

    Raises:
        OutputError: the file cannot be written.
    """
    known = {} if known is None else known
    new = [name for name in _names(folder) if name not in known and name not in EDITABLE]
    records = {name: known[name] for name in _names(folder) if name in known}
    with progress("hashing (MB)", sum((folder / name).stat().st_size for name in new) / _MB) as bar:
        records |= {name: file_record(folder / name, bar) for name in new}
    _write(folder, records)


def add_to_manifest(folder: Path, name: str, content: Path | None = None) -> None:
    """Record a file that was written after the manifest; every file of a folder that has none yet.

    Args:
        folder: the folder.
        name: of the file.
        content: what will have that name, where it has not yet.

    Raises:
        CheckpointError: see `read_manifest`.
        OutputError: see `write_manifest`.
    """
    if not (folder / FILE).is_file():
        write_manifest(folder)
    _write(folder, {**(read_manifest(folder) or {}), name: file_record(content or folder / name)})


def file_record(path: Path, bar: Bar | None = None) -> FileRecord:
    """Size and digest of a file as it is now.

    Args:
        path: the file.
        bar: moved by the megabytes that are read.
    """
    return FileRecord(path.stat().st_size, digest(path, None if bar is None else lambda read: bar.update(read / _MB)))


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The records of a folder by file name; None where it has no manifest.

    Raises:
        CheckpointError: the manifest is not as it was written.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        text = path.read_bytes().decode("utf-8")  # a changed end of line counts
        data = json.loads(text)
        records = {name: FileRecord(**record) for name, record in data["files"].items()}
        if data["format"] != FORMAT or text != _rendered(records, data["tool_version"]):
            raise ValueError("it does not agree with its own digest")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not as it was written: {error}",
            expected=f"format {FORMAT}, as written by sse-convert",
            fix="get or make the folder again, or upgrade sse-convert",
        ) from error
    return records


def inherited_records(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Records of files that another folder takes over, as far as this one's manifest has them with a digest.

    Raises:
        CheckpointError: see `read_manifest`.
    """
    records = read_manifest(folder) or {}
    return {name: records[name] for name in names if name in records and records[name].sha256 is not None}


def changed_files(folder: Path, records: Mapping[str, FileRecord], now: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with each file that is not as recorded, one line per file.

    Args:
        folder: the folder.
        records: its manifest.
        now: SHA-256 of files that were read already; of others it is computed.
    """
    left = sum(record.bytes for name, record in records.items() if name not in now) / _MB
    with progress("hashing (MB)", left) as bar:
        for name, record in records.items():
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing"
            elif (size := path.stat().st_size) != record.bytes:
                yield f"{name} has {size} bytes, {record.bytes} were written"
            elif record.sha256 is not None and (now.get(name) or file_record(path, bar).sha256) != record.sha256:
                yield f"{name} is not what was written (another SHA-256)"


def added_files(folder: Path, records: Mapping[str, FileRecord]) -> list[str]:
    """Files of a folder that its manifest does not have; the model card and hidden files do not count."""
    return [name for name in _names(folder) if name not in records and name not in EDITABLE]


def _names(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path.as_posix() for path in found if path.as_posix() != FILE and not path.parts[0].startswith(".")]


def _write(folder: Path, records: Mapping[str, FileRecord]) -> None:
    write_text(folder / FILE, _rendered(records, __version__))


def _rendered(records: Mapping[str, FileRecord], tool_version: str) -> str:
    """The one text that these records have."""
    files = {name: dc.asdict(records[name]) for name in sorted(records)}
    content: dict[str, Any] = {"format": FORMAT, "tool_version": tool_version, "files": files}
    own = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": own}, indent=1) + "\n"
