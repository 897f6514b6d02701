"""A report that a command goes on with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.hybrid_measure import environment
from sse_convert.errors import UsageError


def resumed_report(out: Path, settings: Mapping[str, Any], entries: str) -> dict[str, Any]:
    """The report that is there, or a new one without entries.

    Args:
        out: JSON file.
        settings: of the command.
        entries: the key of what is measured.

    Raises:
        UsageError: it was measured with other settings.
    """
    if not out.is_file():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return {"schema": 1, "environment": environment(device), "settings": dict(settings), entries: []}
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if report["settings"] != settings:
        raise UsageError(
            f"{out} has other settings: {report['settings']}",
            expected=str(settings),
            fix="give another --out, or the settings as they were",
        )
    return report
