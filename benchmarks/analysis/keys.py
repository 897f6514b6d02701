"""How many rows of a state a token leaves alone."""

from typing import Any

from torch import Tensor

from benchmarks.analysis.routes import of_written
from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity

THRESHOLD = 1e-5
"""entries of phi(k) closer to zero than this write nothing (paper, Figure row_sparsity)"""


def small_share(k: Tensor) -> float:
    """Share of entries with |k| < `THRESHOLD`."""
    return float((k.abs() < THRESHOLD).double().mean())


class RowSparsity(Quantity):
    """Share of phi(k)'s channels under `THRESHOLD`, in the partitions a token writes and in the shared one.

    phi(k) is what the feature map gives, before the partition gate.

    Source: arXiv:2507.16577, section "Ablation Study", Figure row_sparsity.
    """

    name = "row_sparsity"
    needs = ("routing",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sparse = self._shared = 0.0
        self._tokens = 0

    def add(self, seen: Seen) -> None:
        """Add the keys of a batch."""
        operands = seen.operands
        self._sparse += operands.num_tokens * small_share(of_written(seen, operands.k_TPHD))
        if operands.shared is not None:
            self._shared += operands.num_tokens * small_share(operands.shared.k_THD)
        self._tokens += operands.num_tokens

    def result(self) -> dict[str, Any]:
        """Shares; null for a shared partition that is not there."""
        shared = self._shared / self._tokens if self.sizes.shared else None
        return {"threshold": THRESHOLD, "sparse": self._sparse / self._tokens, "shared": shared}
