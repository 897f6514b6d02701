"""Frozen matrices of linear modules take less memory, and give the same to the bit.

Autocast computes a product in its own dtype, whatever the weight has. So a matrix that is not trained can have that
dtype itself. Of values that it cannot hold the originals wait on the CPU for the stage's end. And what student and
teacher have in common exists once. FSDP shards float32 weights and casts them when it gathers them, so there they stay
as they are.
"""

import torch
from torch import Tensor, nn

from sse_convert.training.lora import BASE, LINEAR

_LOW = (torch.bfloat16, torch.float16)


def hold_low(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Give frozen matrices of linear modules the dtype of autocast, but for those that other modules have too, as they
    have a tied embedding.

    Args:
        model: in float32, on the CPU; what is trained is decided.
        dtype: of autocast.

    Returns:
        Name -> the matrix as it was, where the dtype does not hold its values.
    """
    elsewhere = {id(p) for module in model.modules() if type(module) not in LINEAR for p in module.parameters(False)}
    originals = {}
    for name, module in model.named_modules():
        if type(module) in LINEAR and not module.weight.requires_grad and id(module.weight) not in elsewhere:
            weight = module.weight.detach()
            module.weight.data = weight.to(dtype)
            if not torch.equal(module.weight.to(weight.dtype), weight):
                originals[f"{name}.weight"] = weight
    return originals


def as_before(state: dict[str, Tensor], originals: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict on the CPU with what was held low in float32 again; an empty one stays empty.

    Args:
        state: of the model.
        originals: what `hold_low` returned.
    """
    wide = {name: value.float() if value.dtype in _LOW else value for name, value in state.items()}
    return wide | {name: value for name, value in originals.items() if name in wide}


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
