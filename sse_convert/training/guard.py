"""Both watches of a stage. Checkpoints hold what they remember: a continued run decides as an uninterrupted one."""

from typing import Any

from sse_convert.training.loss_spikes import SpikeWatch
from sse_convert.training.router_collapse import Action, CollapseWatch


class Guard:
    """Both watches of a stage.

    Args:
        spikes: limit of a loss, see `SpikeWatch`.
        collapse: what to do about a collapsed router.
        memory: what an interrupted run remembered.
    """

    def __init__(self, spikes: float | None, collapse: Action, memory: dict[str, Any] | None = None) -> None:
        memory = memory or {"losses": [], "counts": {}}
        self.spikes = SpikeWatch(spikes, list(memory["losses"]))
        self.collapse = CollapseWatch(collapse, {int(i): count for i, count in memory["counts"].items()})

    def memory(self) -> dict[str, Any]:
        """JSON-ready; a `Guard` made with it goes on from here."""
        return {"losses": self.spikes.losses, "counts": {str(i): n for i, n in self.collapse.counts.items()}}
