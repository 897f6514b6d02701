"""How evenly states use their directions: singular value entropy."""

import math
from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity


def singular_value_entropy(gram: Tensor, singular_values: int) -> Tensor:
    """-1 / log n * sum over i of p_i log p_i with p_i = s_i^2 / sum_j s_j^2, s_1 ... s_n the singular values of S.

    1 for equal singular values, 0 for rank one, NaN for S = 0.

    Args:
        gram: [..., V, V], S^T S; the eigenvalues of S^T S are the s_i^2.
        singular_values: n, the smaller side of S.

    Source: arXiv:2507.16577, section "SSE", footnote on singular value entropy.
    """
    power = torch.linalg.eigvalsh(gram.double()).clamp_min(0)
    p = power / power.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy / math.log(singular_values)


class StateEntropy(Quantity):
    """Singular value entropy of the states at the end of each row, averaged over heads and rows.

    For each partition by itself, and with partitions stacked: one matrix of all their rows.
    """

    name = "entropy"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sum, self._count = torch.zeros(self.sizes.states + 2).double(), torch.zeros(self.sizes.states + 2)

    def add(self, seen: Seen) -> None:
        """Add the states of a batch of rows; a state of zeros has no entropy and does not count."""
        states_SMHDV = seen.states_SMHDV.double().cpu()
        gram_SMHVV = states_SMHDV.mT @ states_SMHDV
        sparse_S1HVV = gram_SMHVV[:, : self.sizes.partitions].sum(1, keepdim=True)
        parts = [
            self._entropy(gram_SMHVV, 1),
            self._entropy(sparse_S1HVV, self.sizes.partitions),
            self._entropy(gram_SMHVV.sum(1, keepdim=True), self.sizes.states),
        ]
        entropy_SEH = torch.cat(parts, 1)
        self._sum += entropy_SEH.nansum((0, 2))
        self._count += entropy_SEH.isfinite().sum((0, 2))

    def _entropy(self, gram: Tensor, partitions: int) -> Tensor:
        rows, columns = partitions * self.sizes.head_dim, self.sizes.value_dim
        return singular_value_entropy(gram, min(rows, columns))

    def result(self) -> dict[str, Any]:
        """Of each partition, of the shared one (null without), of the sparse ones stacked and of all stacked."""
        mean = (self._sum / self._count).tolist()
        states = mean[: self.sizes.states]
        return {
            "partitions": states[: self.sizes.partitions],
            "shared": states[-1] if self.sizes.shared else None,
            "sparse_stacked": mean[-2],
            "stacked": mean[-1],
        }
