"""Routers that send every token to the same partitions: found by the entropy of their load, and named."""

import dataclasses as dc
import math
from typing import Any

ENTROPY = 0.2
"""a router counts as collapsed where its load's entropy is below: 0 is one partition for all tokens, 1 an even load"""
LOOKS = 5
"""looks in a row, one every 10 steps, that must find it so"""


@dc.dataclass(slots=True)
class CollapseWatch:
    """Counts, for each layer, the looks in a row that found its router collapsed.

    Checkpoints hold what it remembers: a continued run decides as an uninterrupted one.
    """

    counts: dict[int, int] = dc.field(default_factory=dict)
    """layer -> looks in a row"""

    @staticmethod
    def of(memory: dict[str, Any] | None) -> "CollapseWatch":
        """One that goes on from `memory()`; None begins."""
        return CollapseWatch({int(i): count for i, count in memory["counts"].items()} if memory else {})

    def memory(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"counts": {str(i): count for i, count in self.counts.items()}}

    def look(self, spread: dict[int, float]) -> list[int]:
        """Layers that count as collapsed after this look.

        Args:
            spread: of each layer's load, by `load_spread`.
        """
        for i, value in spread.items():
            self.counts[i] = self.counts.get(i, 0) + 1 if value < ENTROPY else 0
        return [i for i in spread if self.counts[i] >= LOOKS]


def load_spread(load: list[float], top_k: int) -> float:
    """Entropy of a load as a share of its range: 0 where all tokens take the same k partitions, 1 where it is even.

    Args:
        load: shares of the partitions, which sum to 1.
        top_k: partitions a token takes; as many as there are leave nothing to choose, which counts as even.
    """
    low, high = math.log(top_k), math.log(len(load))
    entropy = -sum(x * math.log(x) for x in load if x > 0)
    return (entropy - low) / (high - low) if high > low else 1.0


def collapse_message(layer: int, load: list[float], step: int) -> str:
    """What is wrong with a collapsed layer, and what to do."""
    busiest = f"{max(load):.0%} of its load is on one partition of {len(load)}"
    return (
        f"layer {layer}: router collapsed at step {step}, {busiest}; "
        "lower the mixers' lr, or balance more: raise balance_coef"
    )


def collapses(records: list[dict[str, Any]]) -> list[str]:
    """What the log says of collapsed routers, one line per layer, of the last look that found it so."""
    last: dict[int, str] = {}
    for record in records:
        for i in record.get("collapsed", []):
            last[i] = collapse_message(i, record["routers"][str(i)]["load"], record["step"])
    return [last[i] for i in sorted(last)]
