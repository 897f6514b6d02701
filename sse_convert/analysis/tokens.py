"""Which tokens go where: the tokens that most set each partition apart."""

from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity

TOP = 8
"""tokens listed per partition"""


def distinctive(count_NU: Tensor) -> Tensor:
    """How much each token stands out in each partition: n log(n / expected), its part of the mutual information.

    expected is n if tokens and partitions were independent. Frequent tokens count more, evenly spread ones nothing.

    Args:
        count_NU: [N, U] how often each token went to each partition.

    Returns:
        float64 [N, U], negative where a token is rarer than expected.
    """
    n = count_NU.double()
    expected = n.sum(1, keepdim=True) * n.sum(0, keepdim=True) / n.sum().clamp_min(1)
    stands_out: Tensor = torch.special.xlogy(n, n / expected.clamp_min(torch.finfo(torch.float64).tiny))
    return stands_out


class TopTokens(Quantity):
    """Tokens by partition, counted over the partitions a token writes."""

    name = "tokens"
    needs = ("routing", "partitions")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = self.sizes.partitions, len(self.text.vocabulary)
        self._count = torch.zeros(shape, dtype=torch.int32, device=self.sizes.device)

    def add(self, seen: Seen) -> None:
        """Count a batch."""
        write_TK = seen.routes.write_TK
        place = write_TK * self._count.shape[1] + seen.tokens_T[:, None]
        ones = torch.ones_like(place, dtype=torch.int32)
        self._count.view(-1).index_add_(0, place.flatten(), ones.flatten())

    def result(self) -> dict[str, Any]:
        """The `TOP` most distinctive tokens of each partition: how often there, and how often in all."""
        count_NU = self._count.cpu()
        total_U = torch.bincount(self.text.index.flatten(), minlength=count_NU.shape[1])
        best = distinctive(count_NU).topk(min(TOP, count_NU.shape[1]), dim=1)
        ids = self.text.vocabulary.tolist()
        return {
            "top": [
                [
                    {"id": ids[u], "text": self.text.names[u], "count": int(count_NU[p, u]), "of": int(total_U[u])}
                    for score, u in zip(best.values[p].tolist(), best.indices[p].tolist(), strict=True)
                    if score > 0
                ]
                for p in range(len(count_NU))
            ]
        }
