"""Information clustering: whether the values that a state row takes in resemble each other."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.analysis.routes import of_written
from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity


def explained_variance(sum_HCV: Tensor, count_HC: Tensor, square_H: Tensor) -> Tensor:
    """Share of the variance of values that their class explains, corrected for chance: 1 if values of a class agree,
    0 on average (below it by chance) if classes mean nothing.

    That is 1 - (within / (n - classes)) / (total / (n - 1)), the adjusted R^2 of class means.

    Args:
        sum_HCV: sum of the values of each class.
        count_HC: values in each class.
        square_H: sum of squared lengths of all values.

    Returns:
        [H]; NaN where every class has one value, or all values are equal.
    """
    n_H, classes_H = count_HC.sum(1), (count_HC > 0).sum(1)
    total = square_H - sum_HCV.sum(1).square().sum(-1) / n_H
    within = square_H - (sum_HCV.square().sum(-1) / count_HC.clamp_min(1)).sum(1)
    return 1 - (within / (n_H - classes_H)) / (total / (n_H - 1))


class Clustering(Quantity):
    """Values by the row they go to: the largest entry of phi(k), in the best partition that a token writes.

    Source: arXiv:2507.16577, section "Row-sparse update", Figure info_cluster.
    """

    name = "clustering"
    needs = ("routing",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        H, classes = self.sizes.heads, self.sizes.partitions * self.sizes.head_dim
        self._sum = self.sizes.zeros(H * classes, self.sizes.value_dim)
        self._count, self._square = self.sizes.zeros(H * classes), self.sizes.zeros(H)

    def add(self, seen: Seen) -> None:
        """Add the values of a batch."""
        H, D = self.sizes.heads, self.sizes.head_dim
        best_T = seen.routes.write_TK[:, 0]
        k_THD, v_THV = (of_written(seen, x)[:, 0] for x in (seen.operands.k_TPHD, seen.operands.v_TPHV))
        class_TH = best_T[:, None] * D + k_THD.argmax(-1)
        heads_H = torch.arange(H, device=class_TH.device)
        place = (heads_H * (self.sizes.partitions * D) + class_TH).flatten()
        self._sum += torch.zeros_like(self._sum, dtype=v_THV.dtype).index_add_(0, place, v_THV.flatten(0, 1))
        self._count += torch.bincount(place, minlength=len(self._count))
        self._square += v_THV.double().square().sum((0, 2))

    def result(self) -> dict[str, Any]:
        """Explained variance by head and its mean; rows used by any token, mean over heads."""
        H, V = self.sizes.heads, self.sizes.value_dim
        count_HC = self._count.view(H, -1)
        explained_H = explained_variance(self._sum.view(H, -1, V), count_HC, self._square)
        return {
            "explained": float(explained_H.nanmean()),
            "explained_by_head": explained_H.tolist(),
            "rows": count_HC.shape[1],
            "rows_used": float((count_HC > 0).double().sum(1).mean()),
        }
