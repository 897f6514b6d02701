"""How much the rows of a state resemble each other, within a partition and across partitions."""

from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity


def unit_rows(state: Tensor) -> Tensor:
    """Rows [..., D, V] divided by their length, in float64; rows of zeros stay zero.

    The inner product of two such rows is Cos(S^i, S^j) = <S^i, S^j> / (|S^i| |S^j|).

    Source: arXiv:2507.16577, Appendix "Theoretical Analysis", before Proposition 2.
    """
    state = state.double()
    length = state.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, state / length, 0.0)


class RowSimilarity(Quantity):
    """Cosine similarity of state rows at the end of each row of text, averaged over heads and rows of text.

    Rows of zeros have no direction and count nowhere; a row's similarity to itself counts nowhere either.
    """

    name = "similarity"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        M = self.sizes.states
        self._absolute, self._signed, self._pairs = (self.sizes.zeros(M, M) for _ in range(3))

    def add(self, seen: Seen) -> None:
        """Add the states of a batch of rows, one row and one partition at a time."""
        for states_MHDV in seen.states_SMHDV:
            rows_HRV = unit_rows(states_MHDV).transpose(0, 1).flatten(1, 2)
            used_HR = rows_HRV.square().sum(-1) > 0
            for p in range(self.sizes.states):
                self._add_partition(p, rows_HRV, used_HR)

    def _add_partition(self, p: int, rows_HRV: Tensor, used_HR: Tensor) -> None:
        D, M = self.sizes.head_dim, self.sizes.states
        own = slice(p * D, (p + 1) * D)
        cosine_HDR = rows_HRV[:, own] @ rows_HRV.mT
        pairs_HDR = (used_HR[:, own, None] & used_HR[:, None]).double()
        pairs_HDR[:, :, own].diagonal(dim1=1, dim2=2).zero_()
        cosine_HDR = cosine_HDR * pairs_HDR

        def by_partition(x_HDR: Tensor) -> Tensor:
            return x_HDR.sum((0, 1)).view(M, D).sum(1)

        self._signed[p] += by_partition(cosine_HDR)
        self._absolute[p] += by_partition(cosine_HDR.abs())
        self._pairs[p] += by_partition(pairs_HDR)

    def result(self) -> dict[str, Any]:
        """Mean |cos| within partitions, across sparse ones and between sparse and shared; block means [M, M]."""
        N = self.sizes.partitions
        same = torch.eye(self.sizes.states, dtype=torch.bool, device=self._pairs.device)
        sparse = torch.zeros_like(same)
        sparse[:N, :N] = True
        return {
            "within": self._mean(same & sparse),
            "across": self._mean(~same & sparse) if N > 1 else None,
            "within_shared": self._mean(same & ~sparse) if self.sizes.shared else None,
            "sparse_to_shared": self._mean(~same & ~sparse) if self.sizes.shared else None,
            "absolute": (self._absolute / self._pairs).tolist(),
            "signed": (self._signed / self._pairs).tolist(),
        }

    def _mean(self, blocks: Tensor) -> float:
        return float(self._absolute[blocks].sum() / self._pairs[blocks].sum())
