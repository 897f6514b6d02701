"""How long states remember by their decays: half-lives in tokens of the text.

What the delta rule overwrites is forgotten sooner.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity, quantiles


class HalfLife(Quantity):
    """Tokens after which half of what was written is left, from the mean log decay of each channel.

    A partition decays only at tokens that write it, so its half-life in tokens of the text is its half-life in its own
    tokens divided by its load.
    """

    name = "half_life"
    needs = ("routing", "decay")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        N, H, D = self.sizes.partitions, self.sizes.heads, self.sizes.head_dim
        self._sparse, self._shared = self.sizes.zeros(N, H, D), self.sizes.zeros(H, D)
        self._written = self._tokens = 0

    def add(self, seen: Seen) -> None:
        """Add the decays of a batch."""
        operands, written_TN = seen.operands, seen.written()
        by_partition_NC = written_TN.T.to(operands.log_decay_THD.dtype) @ operands.log_decay_THD.flatten(1)
        self._sparse += by_partition_NC.view_as(self._sparse)
        self._written += seen.routes.write_TK.shape[1] * operands.num_tokens
        self._tokens += operands.num_tokens
        if operands.shared is not None:
            self._shared += operands.shared.log_decay_THD.double().sum(0)

    def result(self) -> dict[str, Any]:
        """Percentiles over heads and channels (and live partitions), medians of each head; null where nothing decays.

        `own` counts the tokens that write a partition, everything else tokens of the text.
        """
        live_N = self._sparse.flatten(1).any(1)
        sparse = _half_life(self._sparse[live_N] / self._tokens)
        shared = _half_life(self._shared / self._tokens) if self.sizes.shared else None
        return {
            "sparse": quantiles(sparse),
            "own": quantiles(_half_life(self._sparse.sum(0) / self._written)),
            "shared": None if shared is None else quantiles(shared),
            "sparse_by_head": [quantiles(sparse[:, h])["median"] for h in range(self.sizes.heads)],
            "shared_by_head": None if shared is None else [quantiles(head)["median"] for head in shared],
        }


def _half_life(mean_log_decay: Tensor) -> Tensor:
    """ln 2 / -x, infinite where nothing decays."""
    return math.log(2) / torch.where(mean_log_decay < 0, -mean_log_decay, 0.0)
