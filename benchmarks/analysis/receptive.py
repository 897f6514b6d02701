"""How far back each channel of a state remembers: the receptive field that the gates leave.

Decays alone are counted; what the delta rule overwrites is forgotten sooner.
"""

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.analysis.routes import read
from sse_convert.analysis.capture import Seen
from sse_convert.analysis.quantity import Quantity, quantiles

WINDOW = 128
"""last tokens of a row whose receptive field is measured (paper, appendix "Receptive Field Analysis")"""
THRESHOLD = 0.001
"""of what was written, the part that must be left (paper, Figure crf)"""


def field_widths(log_decay_TC: Tensor, window: int, threshold: float = THRESHOLD) -> Tensor:
    """Width of the receptive field of the last tokens of one sequence, by channel.

    For token t and channel c, the largest t - s for which the product of the decays of s + 1 ... t is at least the
    threshold: what s wrote is then still there. The sequence's start bounds it.

    Args:
        log_decay_TC: natural log of the decays, 0 for tokens that do not decay the state.
        window: number of last tokens.
        threshold: of the product.

    Returns:
        int64 [window, C] tokens.

    Source: arXiv:2507.16577, Appendix "Receptive Field Analysis", and the definition of M_t before Proposition 4.
    """
    decay_CT = -log_decay_TC.double().cumsum(0).T.contiguous()
    T = decay_CT.shape[1]
    ends = torch.arange(T - window, T, device=decay_CT.device)
    reach_CW = decay_CT[:, ends] + math.log(threshold)
    first_CW = torch.searchsorted(decay_CT, reach_CW)
    return ends[:, None] - first_CW.T


class ReceptiveField(Quantity):
    """Widths over the last `WINDOW` tokens of each row, each looking back as far as the row goes.

    In a partition only the tokens that write it decay it; its width is measured at the tokens that read it.
    """

    name = "receptive_field"
    needs = ("routing",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        N, C = self.sizes.partitions, self.sizes.heads * self.sizes.head_dim
        self._width, self._queries = self.sizes.zeros(N + 1, C), self.sizes.zeros(N + 1)
        self._full = self.sizes.zeros(N + 1, C)

    def add(self, seen: Seen) -> None:
        """Add a batch, one row and one partition at a time."""
        operands, written_TN, read_TN = seen.operands, seen.written(), read(seen)
        everyone = torch.ones(WINDOW, dtype=torch.bool, device=written_TN.device)
        for start, end in operands.spans():
            last = slice(end - WINDOW, end)
            log_decay_TC = operands.log_decay_THD[start:end].flatten(1)
            for p in range(self.sizes.partitions):
                own_TC = log_decay_TC * written_TN[start:end, p, None]
                self._add_widths(p, own_TC, read_TN[last, p])
            if operands.shared is not None:
                self._add_widths(-1, operands.shared.log_decay_THD[start:end].flatten(1), everyone)

    def _add_widths(self, p: int, log_decay_TC: Tensor, queries_W: Tensor) -> None:
        if not queries_W.any():
            return
        width_WC = field_widths(log_decay_TC, WINDOW)[queries_W]
        ends = torch.arange(len(log_decay_TC) - WINDOW, len(log_decay_TC), device=width_WC.device)[queries_W]
        self._width[p] += width_WC.sum(0)
        self._full[p] += (width_WC == ends[:, None]).sum(0)
        self._queries[p] += len(width_WC)

    def result(self) -> dict[str, Any]:
        """Tokens: mean and percentiles over channels; `full` is the share of widths that the row's start bounds."""
        N = self.sizes.partitions
        partitions = (self._width[:N].mean(1) / self._queries[:N]).tolist()
        return {
            "window": WINDOW,
            "threshold": THRESHOLD,
            "sparse": self._summary(slice(0, N)),
            "shared": self._summary(slice(N, N + 1)) if self.sizes.shared else None,
            "partitions": partitions,
        }

    def _summary(self, part: slice) -> dict[str, float]:
        width_C = self._channels(self._width, part)
        full = float(self._channels(self._full, part).mean())
        return {"mean": float(width_C.mean()), **quantiles(width_C), "full": full}

    def _channels(self, sums: Tensor, part: slice) -> Tensor:
        return sums[part].sum(0) / self._queries[part].sum()
