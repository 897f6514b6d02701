"""What moves the weights: AdamW, or Muon for matrices beside it; the learning rate of each parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sse_convert.errors import TrainingError
from sse_convert.recipe.schema import LearningRates, Stage
from sse_convert.surgery.teacher import is_new_tensor

BETAS = (0.9, 0.95)
"""AdamW's"""


def learning_rates(stage: Stage) -> LearningRates:
    """The peak rates of all groups."""
    return stage.lr if isinstance(stage.lr, LearningRates) else LearningRates(mixers=stage.lr, rest=stage.lr)


def _rate_of(name: str, rates: LearningRates, is_mixer: Callable[[str], bool]) -> float:
    """The peak rate of a parameter."""
    if not is_mixer(name):
        assert rates.rest is not None, "recipe checks see to it"
        return rates.rest
    return rates.new if rates.new is not None and is_new_tensor(name) else rates.mixers


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for some groups and AdamW for the others, as one optimizer with one state.

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
            self._inner.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
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
