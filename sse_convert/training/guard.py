"""Both watches of a stage. Checkpoints hold what they remember: a continued run decides as an uninterrupted one."""

from typing import Any

from sse_convert.recipe.stage_settings import Collapse, Spikes
from sse_convert.training.loss_spikes import SpikeWatch
from sse_convert.training.router_collapse import CollapseWatch


class Guard:
    """Both watches of a stage.

    Args:
        spikes: settings.
        collapse: settings.
        memory: what an interrupted run remembered.
    """

    def __init__(self, spikes: Spikes, collapse: Collapse, memory: dict[str, Any] | None = None) -> None:
        memory = memory or {"losses": [], "counts": {}}
        self.spikes = SpikeWatch(spikes, list(memory["losses"]))
        self.collapse = CollapseWatch(collapse, {int(i): count for i, count in memory["counts"].items()})

    def memory(self) -> dict[str, Any]:
        """JSON-ready; a `Guard` made with it goes on from here."""
        return {"losses": self.spikes.losses, "counts": {str(i): n for i, n in self.collapse.counts.items()}}
