"""The table of needles that one converted layer loses, from `benchmarks/quality/lost/`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.quality.lost_needles import CHANGES
from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "quality" / "lost"
FOUND = tuple(f"found, {change}" for change in CHANGES)
HEAD = ("trained at", "needle", "rows", *FOUND, "by fifth of the row", "crowd: found, lost")


def lost() -> str:
    """Needles found as rows are and under each change, as they are by place, and how crowded their partitions are."""
    rows = []
    for path in sorted(FOLDER.glob("*.json"), reverse=True):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows += [(path.stem.replace("-", " "), *_row(part)) for part in report["parts"]]
    return "\n".join(table(HEAD, rows))


def _row(part: Mapping[str, Any]) -> tuple[str, ...]:
    asked = f"one {part['kind']}" + ("" if part["keys"] == 1 else f" of {part['keys']}")
    found = [f"{part['found'][change]['accuracy']:.0%}" for change in CHANGES]
    places = ", ".join(f"{entry['accuracy']:.0%}" for entry in part["by_depth"])
    crowd = ", ".join(_crowd(part["crowd"][name]) for name in ("found", "lost"))
    return asked, f"{part['length'] // 1024}K", *found, places, crowd


def _crowd(load: float | None) -> str:
    return "-" if load is None else f"{load:.1f}"


BLOCKS: Mapping[str, Callable[[], str]] = {"lost-needles": lost}
