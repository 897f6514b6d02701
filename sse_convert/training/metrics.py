"""The step log: metrics.jsonl, one line per optimizer step."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends records; only the main process does.

    Args:
        folder: holds metrics.jsonl.
        accelerator: of the stage.
    """

    def __init__(self, folder: Path, accelerator: "Accelerator") -> None:
        self._path = folder / FILE
        self.written = 0
        """records of this start"""
        self._accelerator = accelerator

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. NaN and Inf are stored as null."""
        self.written += 1
        clean = {key: _finite(value) for key, value in record.items()}
        if self._accelerator.is_main_process:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(clean)}\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a log; a last line cut short by a kill is left out.

    Raises:
        CheckpointError: a line is damaged, or one is missing.
    """
    if not path.is_file():
        return []
    records = [_record(line) for line in path.read_bytes().split(b"\n")[:-1]]
    for number, record in enumerate(records, start=1):
        if record is None or record["step"] != number:
            raise CheckpointError(
                f"{path} cannot be read: line {number} is not the record of step {number}",
                expected="one JSON object for each step",
                fix="restore the file from a copy; while its stage is unfinished, running that again mends it",
            )
    return [record for record in records if record is not None]


def mended(text: bytes, steps: int) -> bytes | None:
    """A log of the first `steps` steps, from one to which two runs may have written: the last record of each step. None
    where one is missing."""
    found = {record["step"]: line for line in text.split(b"\n")[:-1] if (record := _record(line)) is not None}
    if any(step not in found for step in range(1, steps + 1)):
        return None
    return b"".join(found[step] + b"\n" for step in range(1, steps + 1))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
