"""AdamW for R models in one set of parameters, each model with its own learning rate."""

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
EPSILON = 1e-8


class AdamW:
    """Decoupled weight decay on every parameter.

    The number of steps lives on the device, so that a step can be captured in a CUDA graph.

    Args:
        parameters: each with R as its first dim.
        learning_rates: [R], on the parameters' device.
        weight_decay: the share of a parameter that a step takes away, over the learning rate.

    Source: arXiv:1711.05101.
    """

    def __init__(self, parameters: Sequence[Tensor], learning_rates: Tensor, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.learning_rates = learning_rates
        self.weight_decay = weight_decay
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = torch.zeros((), device=learning_rates.device)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        """Move the parameters against the gradients by learning rate times `factor`, 0-d."""
        self.steps += 1
        beta1, beta2 = BETAS
        correction = torch.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        for parameter, gradient, first, second in zip(self.parameters, gradients, self.first, self.second, strict=True):
            rate = (self.learning_rates * factor).view(-1, *[1] * (parameter.dim() - 1))
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.mul_(1 - rate * self.weight_decay)
            parameter.sub_(rate * correction * first / (second.sqrt() + EPSILON))
