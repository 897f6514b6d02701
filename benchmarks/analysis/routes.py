"""What a token reads, and the keys and values of what it writes, of a layer with a routing."""

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen
from sse_convert.kernels.torch.operands import gather_rows


def read(seen: Seen) -> Tensor:
    """bool [T, N], whether a token reads a partition."""
    return torch.zeros_like(seen.routes.gate_TN, dtype=torch.bool).scatter_(1, seen.routes.read_TK, True)


def of_written(seen: Seen, x_TP: Tensor) -> Tensor:
    """Keys or values [T, P, ...] of the partitions written, best first, [T, K, ...]; as they are where P = 1."""
    if x_TP.shape[1] == 1:
        return x_TP
    write_TK = seen.routes.write_TK
    tokens = torch.arange(len(write_TK), device=write_TK.device)[:, None].expand_as(write_TK)
    return gather_rows(x_TP, tokens, write_TK)
