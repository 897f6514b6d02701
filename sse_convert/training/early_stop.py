"""Early stop of single layers in alignment: a layer whose error no longer falls is left as it is."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

WINDOW = 50
"""optimizer steps whose mean relative error is judged"""


class LayerStops:
    """Watches the relative error of each layer.

    Args:
        improvement: stop when the mean error of a window is not lower by this share than that of the window before;
            None never does.
        memory: what an interrupted run remembered.
    """

    def __init__(self, improvement: float | None, memory: Mapping[str, Any] | None = None) -> None:
        memory = memory or {"recent": {}, "stopped": {}}
        self._improvement = improvement
        self._recent: dict[str, list[float]] = {i: list(errors) for i, errors in memory["recent"].items()}
        self.stopped: dict[int, dict[str, Any]] = {int(i): dict(stop) for i, stop in memory["stopped"].items()}
        """layer -> `step`, `error` (mean of the last window) and `why`"""

    def memory(self) -> dict[str, Any]:
        """JSON-ready; a `LayerStops` made with it goes on from here."""
        return {"recent": self._recent, "stopped": {str(i): stop for i, stop in self.stopped.items()}}

    def look(self, step: int, errors: Mapping[int, float]) -> list[int]:
        """Take in one step's errors of the layers that still train; returns the layers that stop with it."""
        if self._improvement is None:
            return []
        new = []
        for i, error in errors.items():
            recent = self._recent.setdefault(str(i), [])
            recent.append(error)
            if len(recent) < 2 * WINDOW:
                continue
            before, last = fmean(recent[:WINDOW]), fmean(recent[WINDOW:])
            if last < (1 - self._improvement) * before:
                del recent[:WINDOW]
            else:
                self.stopped[i] = {"step": step, "error": last, "why": "no improvement"}
                del self._recent[str(i)]
                new.append(i)
        return new
