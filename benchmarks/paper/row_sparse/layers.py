"""The small layers that R independent models share in one call. Every parameter has R as its first dim."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


class Linear(nn.Module):
    """x W + b of each model.

    Args:
        runs: R.
        inputs: width of x.
        outputs: width of the result.
        bias: with b, zero at the start; W starts with standard deviation inputs ** -0.5.
    """

    def __init__(self, runs: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(runs, inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(runs, 1, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[R, ..., inputs] to [R, ..., outputs]."""
        flat = x.flatten(1, -2)
        y = torch.bmm(flat, self.weight) if self.bias is None else torch.baddbmm(self.bias, flat, self.weight)
        return torch.unflatten(y, 1, x.shape[1:-1])


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim, with a learned scale."""

    def __init__(self, runs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(runs, width))

    def forward(self, x: Tensor) -> Tensor:
        """[R, ..., width] to the same."""
        weight = self.weight.view(len(self.weight), *[1] * (x.dim() - 2), -1)
        return F.rms_norm(x, x.shape[-1:], eps=NORM_EPS) * weight


class ShortConvolution(nn.Module):
    """Each channel's causal filter over the last `size` tokens, then SiLU; the newest token meets the last weight."""

    def __init__(self, runs: int, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(runs, 1, 1, width, size) * size**-0.5)

    def forward(self, x_RBTW: Tensor) -> Tensor:
        """[R, B, T, W] to the same."""
        size, T = self.weight.shape[-1], x_RBTW.shape[2]
        padded = F.pad(x_RBTW, (0, 0, size - 1, 0))
        y = x_RBTW * self.weight[..., size - 1]
        for i in range(size - 1):
            y = torch.addcmul(y, padded[:, :, i : i + T], self.weight[..., i])
        return F.silu(y)


class ChannelMixer(nn.Module):
    """SwiGLU with a hidden width of twice the model's."""

    def __init__(self, runs: int, width: int) -> None:
        super().__init__()
        self.up = Linear(runs, width, 4 * width)
        self.down = Linear(runs, 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[R, ..., W] to the same."""
        gate, value = self.up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * value)
        return y
