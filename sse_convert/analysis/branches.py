"""What the partitions and the shared partition each give to a layer's output."""

from typing import Any

from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity


class BranchNorms(Quantity):
    """Size of the two summands of o = sum over i of e_i q S_i + q' S_shared, before the output norm.

    Source: arXiv:2507.16577, section "SSE", equation state_output, with the always-selected partition beside it.
    """

    name = "branches"
    needs = ("shared",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sparse, self._shared, self._product = (self.sizes.zeros(self.sizes.query_heads) for _ in range(3))
        self._elements = 0

    def add(self, seen: Seen) -> None:
        """Add the outputs of a batch."""
        assert seen.shared_TQV is not None
        sparse, shared = seen.sparse_TQV.double(), seen.shared_TQV.double()
        self._sparse += sparse.square().sum((0, 2))
        self._shared += shared.square().sum((0, 2))
        self._product += (sparse * shared).sum((0, 2))
        self._elements += sparse.shape[0] * sparse.shape[2]

    def result(self) -> dict[str, Any]:
        """Root mean squares over heads, tokens and channels; the partitions' share of the power, in all and by head;
        cosine between the two, of a head's whole output, mean over heads."""
        share_Q = self._sparse / (self._sparse + self._shared)
        cosine_Q = self._product / (self._sparse * self._shared).sqrt()
        return {
            "sparse_rms": self._rms(self._sparse),
            "shared_rms": self._rms(self._shared),
            "sparse_share": float(self._sparse.sum() / (self._sparse + self._shared).sum()),
            "sparse_share_by_head": share_Q.tolist(),
            "cosine": float(cosine_Q.nanmean()),
        }

    def _rms(self, square_Q: Tensor) -> float:
        return float((square_Q.mean() / self._elements).sqrt())
