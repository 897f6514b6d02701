"""What all quantities have in common: sums over the batches of one layer, bounded whatever the length of the text."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from torch import Tensor

from sse_convert.analysis.capture import Seen, Sizes
from sse_convert.data.sample_text import Text
from sse_convert.kernels.routing import partition_gate
from sse_convert.mixers import SSEMixer

Need = Literal["routing", "partitions", "shared", "decay"]


class Quantity(ABC):
    """One quantity of one layer.

    Args:
        sizes: of the layer.
        text: what the layer will see.
    """

    name: ClassVar[str]
    """key in the report"""
    needs: ClassVar[tuple[Need, ...]] = ()
    """what a layer must have for it"""

    def __init__(self, sizes: Sizes, text: Text) -> None:
        self.sizes = sizes
        self.text = text

    @classmethod
    def absent(cls, mixer: SSEMixer) -> str | None:
        """Why the quantity does not apply to a layer; None where it does."""
        gate, by_keys = partition_gate(mixer.partition_gate), mixer.router == "keys"
        reads_state = gate is not None and gate.needs_state
        keys, state = "partitions are chosen by keys: not built", "the partition gate reads the state: no routes before"
        missing: dict[Need, tuple[bool, str]] = {
            "routing": (by_keys or reads_state, keys if by_keys else state),
            "partitions": (mixer.num_partitions == 1, "one partition: nothing is routed"),
            "shared": (not mixer.shared_partition, "no shared partition"),
            "decay": (mixer.decay == "none", "the layer has no decay"),
        }
        return next((reason for need in cls.needs for lacking, reason in [missing[need]] if lacking), None)

    @abstractmethod
    def add(self, seen: Seen) -> None:
        """Add one batch."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """JSON-ready, but for NaN where nothing was found."""


def quantiles(x: Tensor) -> dict[str, float]:
    """10th, 50th and 90th percentile (the nearest value, so that infinities do no harm), NaN of nothing."""
    levels = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    if x.numel() == 0:
        return dict.fromkeys(levels, float("nan"))
    ordered = x.flatten().sort().values
    return {name: float(ordered[round(level * (len(ordered) - 1))]) for name, level in levels.items()}
