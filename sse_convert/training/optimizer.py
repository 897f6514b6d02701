"""What moves the weights: AdamW, or Muon for matrices beside it; the learning rate of each parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sse_convert.checkpoints.teacher import is_new_tensor
from sse_convert.errors import TrainingError
from sse_convert.recipe.schema import LearningRates, Stage
from sse_convert.surgery.cpu_speed import fast_in_bfloat16

BETAS = (0.9, 0.95)
"""AdamW's"""
AT_ONCE = 2**26
"""elements of the matrices that are made orthogonal together: all of a small model's, one of a large one's"""


def learning_rates(stage: Stage) -> LearningRates:
    """The peak rates of all groups."""
    return stage.lr if isinstance(stage.lr, LearningRates) else LearningRates(mixers=stage.lr, rest=stage.lr)


def _rate_of(name: str, rates: LearningRates, is_mixer: Callable[[str], bool]) -> float:
    """The peak rate of a parameter."""
    if not is_mixer(name):
        assert rates.rest is not None, "recipe checks see to it"
        return rates.rest
    return rates.new if rates.new is not None and is_new_tensor(name) else rates.mixers


class StackedMuon(torch.optim.Muon):
    """torch's Muon, with matrices of a shape in one product: small ones cost as much as it takes to launch them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient; sharded ones (FSDP) one by one, as torch does."""
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            super().step()  # type: ignore[no-untyped-call]
            return
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, alike in by_shape.items():
                count = max(1, AT_ONCE // shape.numel())
                for i in range(0, len(alike), count):
                    self._move(alike[i : i + count], group)

    def _move(self, alike: list[Tensor], group: dict[str, Any]) -> None:
        """One step of matrices of one shape; their rate is a number, or a tensor without dimensions on their device."""
        for p in alike:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means: list[Any] = [self.state[p]["momentum_buffer"] for p in alike]
        gradients: list[Any] = [p.grad for p in alike]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        ahead_NAB = torch.stack(torch._foreach_lerp(gradients, means, group["momentum"]))
        step_NAB = orthogonal(ahead_NAB, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(ahead_NAB.dtype)
        # products and differences alone: a rate in a tensor is not waited for
        step_NAB *= group["lr"] * (0.2 * max(alike[0].shape) ** 0.5)
        torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(alike, list(step_NAB.unbind()))


def orthogonal(x_NAB: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Each matrix with its singular values brought near one, bfloat16 [N, A, B]; float32 on a CPU that is slow in that.

    Newton-Schulz: X <- a X + (b G + c G^2) X with G = X X^T, from X / |X|. Five steps with torch's coefficients bring
    singular values to 0.7 to 1.2, which is near enough.

    Args:
        x_NAB: N matrices.
        coefficients: a, b, c.
        steps: of the iteration.
        eps: smallest norm to divide by.
    """
    a, b, c = coefficients
    wide = x_NAB.shape[1] <= x_NAB.shape[2]
    x = x_NAB.to(torch.bfloat16 if fast_in_bfloat16(x_NAB.device) else torch.float32)
    x = x if wide else x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some groups and AdamW for the others, as one optimizer with one state.

    A step of Muon is scaled to the root mean square of a usual step of AdamW, so both take the same learning rates.

    Args:
        matrices: groups whose parameters are all 2-D.
        others: groups of anything.
        fused: use the fused GPU implementation of AdamW.

    Source: Jordan et al., Muon (2024); the scale: Liu et al., "Muon is Scalable for LLM Training" (2025), section 2.2.
    """

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], *, fused: bool) -> None:
        self._inner: list[torch.optim.Optimizer] = []
        if matrices:
            self._inner.append(StackedMuon(matrices, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._inner.append(torch.optim.AdamW(others, betas=BETAS, fused=fused))
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What loading a state ends with, after which groups and state are other objects."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give the two their groups and the common state."""
        groups = iter(self.param_groups)
        for inner in self._inner:
            inner.state = self.state
            inner.param_groups = [next(groups) for _ in inner.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient."""
        for inner in self._inner:
            inner.step()


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    stage: Stage,
    *,
    is_mixer: Callable[[str], bool],
    is_inner: Callable[[str], bool],
    fused: bool,
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The stage's optimizer over the trainable parameters, in groups by learning rate; weight decay only on matrices.

    Args:
        named: names and parameters; frozen ones are left out.
        stage: optimizer, learning rates and weight decay.
        is_mixer: whether a parameter of this name belongs to a converted layer's mixer.
        is_inner: whether it belongs to a decoder layer: Muon is for the matrices there, not for embeddings and head.
        fused: use the fused GPU implementation of AdamW.

    Returns:
        The optimizer, and the peak learning rate of each of its groups.

    Raises:
        TrainingError: nothing is trainable.
    """
    rates = learning_rates(stage)
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            muon = stage.optimizer == "muon" and parameter.dim() == 2 and is_inner(name)
            decay = stage.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((muon, _rate_of(name, rates, is_mixer), decay), []).append(parameter)
    if not groups:
        raise TrainingError(f"stage {stage.name}: nothing to train", expected="converted layers, or train: all")
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (muon, rate, decay), parameters in groups.items():
        parts[muon].append({"params": parameters, "lr": rate, "weight_decay": decay})
    optimizer: torch.optim.Optimizer
    if parts[True]:
        optimizer = MuonAdamW(parts[True], parts[False], fused=fused)
    else:
        optimizer = torch.optim.AdamW(parts[False], betas=BETAS, fused=fused)
    return optimizer, [group["lr"] for group in optimizer.param_groups]
