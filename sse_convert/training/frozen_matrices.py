"""Frozen matrices of linear modules and of experts take less memory; linear modules give the same to the bit.

Autocast computes a product in its own dtype, whatever the weight has. So a matrix that is not trained can have that
dtype itself. Of values that it cannot hold the originals wait on the CPU for the stage's end. And what student and
teacher have in common exists once. FSDP shards float32 weights and casts them when it gathers them, so there they stay
as they are.

Grouped products of experts are no matter of autocast: they have the dtype of their weights. In float32 a GPU takes many
times as long, and the teacher beside has the lower dtype.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sse_convert.checkpoints.meta_model import EXPERTS
from sse_convert.training.lora import BASE, LINEAR

STACKED = 3
"""dimensions of the matrices of all experts"""
ALIGNED = 8
"""grouped products need rows and columns of so many elements, 16 bytes, or multiples"""
PART = 1 << 20
"""elements that are compared at once"""


def hold_low(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Give frozen matrices of linear modules and of experts the dtype of autocast, but for those that other modules
    have too, as they have a tied embedding.

    Args:
        model: in float32, on the CPU; what is trained is decided.
        dtype: of autocast.

    Returns:
        Name -> the matrix as it was, where the dtype does not hold its values.
    """
    originals = {}
    for name, matrix in _matrices(model):
        if not matrix.requires_grad:
            wide = matrix.detach()
            matrix.data = wide.to(dtype)
            if not _holds(matrix.data, wide):
                originals[name] = wide
    return originals


def _holds(low: Tensor, wide: Tensor) -> bool:
    """Whether both have the same values; a part at a time, since memory that is new takes long."""
    low, wide = low.flatten(), wide.flatten()
    parts = (slice(i, i + PART) for i in range(0, len(wide), PART))
    return all(torch.equal(low[part].to(wide.dtype), wide[part]) for part in parts)


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Matrices that are used in products alone: of linear modules, and those of all experts in one tensor, where
    grouped products take them with two bytes an element."""
    elsewhere = {id(p) for module in model.modules() if type(module) not in LINEAR for p in module.parameters(False)}
    for name, module in model.named_modules():
        if type(module) in LINEAR and id(module.weight) not in elsewhere:
            yield f"{name}.weight", module.weight
    for name, parameter in model.named_parameters():
        if parameter.dim() == STACKED and EXPERTS in name and not any(n % ALIGNED for n in parameter.shape[1:]):
            yield name, parameter


def with_originals(state: dict[str, Tensor], originals: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict on the CPU with the values that matrices had; an empty one stays empty. What the lower dtype holds
    stays in it, which is half of what a checkpoint would write and read.

    Args:
        state: of the model.
        originals: what `hold_low` returned.
    """
    return state | {name: value for name, value in originals.items() if name in state}


def share(model: nn.Module, other: nn.Module) -> None:
    """Let frozen parameters be those of another frozen model, of the same names, where the two are equal.

    Args:
        model: the student, on its device; adapters may be in it.
        other: the teacher.
    """
    others = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        twin = others.get(name.replace(BASE, "."))
        if not parameter.requires_grad and twin is not None and _same(parameter, twin):
            parameter.data = twin.data


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)
