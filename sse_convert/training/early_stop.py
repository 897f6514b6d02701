"""Early stop of single layers in alignment: a layer whose error is low enough, or no longer falls, is left as it is."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from sse_convert.recipe.stage_settings import EarlyStop


class LayerStops:
    """Watches the relative error of each layer.

    Args:
        settings: when to stop; None never does.
        memory: what an interrupted run remembered.
    """

    def __init__(self, settings: EarlyStop | None, memory: Mapping[str, Any] | None = None) -> None:
        memory = memory or {"recent": {}, "stopped": {}}
        self._settings = settings
        self._recent: dict[str, list[float]] = {i: list(errors) for i, errors in memory["recent"].items()}
        self.stopped: dict[int, dict[str, Any]] = {int(i): dict(stop) for i, stop in memory["stopped"].items()}
        """layer -> `step` (of its turn), `error` (mean of the last window) and `why`"""

    def memory(self) -> dict[str, Any]:
        """JSON-ready; a `LayerStops` made with it goes on from here."""
        return {"recent": self._recent, "stopped": {str(i): stop for i, stop in self.stopped.items()}}

    def look(self, step: int, errors: Mapping[int, float]) -> list[int]:
        """Take in one step's errors of the layers that still train; returns the layers that stop with it."""
        if self._settings is None:
            return []
        new = []
        for i, error in errors.items():
            recent = self._recent.setdefault(str(i), [])
            recent.append(error)
            if (why := self._verdict(recent, self._settings)) is not None:
                mean = fmean(recent[-self._settings.window :])
                self.stopped[i] = {"step": step, "error": mean, "why": why}
                del self._recent[str(i)]
                new.append(i)
            elif len(recent) == 2 * self._settings.window:
                del recent[: self._settings.window]
        return new

    @staticmethod
    def _verdict(recent: list[float], settings: EarlyStop) -> str | None:
        """Why a layer stops; its improvement is judged once per window."""
        window = settings.window
        if len(recent) < window:
            return None
        last = fmean(recent[-window:])
        if last < settings.below:
            return f"below {settings.below:g}"
        if settings.improvement is None or len(recent) < 2 * window:
            return None
        before = fmean(recent[:window])
        return None if last < (1 - settings.improvement) * before else "no improvement"
