"""Where tokens go: how full partitions are, how sure the router is, and which partitions nobody uses."""

import math
from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity
from sse_convert.kernels.routing import load

DEAD = 0.01
"""a partition is dead when fewer tokens write it than this part of an even share"""


def evenness(p: Tensor) -> Tensor:
    """Entropy of shares along the last dim as a part of the largest possible: 1 for equal shares, 0 for one alone."""
    p = p / p.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy / math.log(p.shape[-1])


class RouterHealth(Quantity):
    """Load of the partitions, entropy of the load and of the gate e, mean e of the partitions written.

    Source: arXiv:2507.16577, section "SSE", equations eta_proj and sparse_index; the load is the f of the balance loss.
    """

    name = "routing"
    needs = ("routing", "partitions")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load, self._entropy, self._gate = self.sizes.zeros(self.sizes.partitions), 0.0, 0.0
        self._tokens, self._written = 0, 1

    def add(self, seen: Seen) -> None:
        """Add the routes of a batch."""
        routing, tokens = seen.routes, seen.operands.num_tokens
        self._load += tokens * load(routing)
        self._entropy += float(evenness(routing.gate_TN.double()).sum())
        self._gate += tokens * float(routing.gate_TN.gather(1, routing.write_TK).double().mean())
        self._tokens += tokens
        self._written = routing.write_TK.shape[1]

    def result(self) -> dict[str, Any]:
        """Loads sum to the partitions a token writes; entropies are parts of log N."""
        load_N = self._load / self._tokens
        least = DEAD * self._written / self.sizes.partitions
        return {
            "load": load_N.tolist(),
            "load_entropy": float(evenness(load_N)),
            "gate_entropy": self._entropy / self._tokens,
            "gate_mean": self._gate / self._tokens,
            "dead": [p for p, share in enumerate(load_N.tolist()) if share < least],
        }
