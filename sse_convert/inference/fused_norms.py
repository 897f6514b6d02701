"""The RMS norms of a model that generates, as one kernel or operator each, where transformers runs up to eight."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.compat import has_compiled_part
from sse_convert.kernels.triton_backend import fuses
from sse_convert.modeling.compat import has_hooks

MAX_CHANNELS = 16384
"""of a row, which one program of the kernel holds"""
ROUND_FIRST = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Granite", "SmolLM3")
"""families whose norm rounds to the input's dtype before the weight multiplies"""
OFFSETS = {**dict.fromkeys((*ROUND_FIRST, "Olmo2"), 0.0), "Gemma2": 1.0, "Gemma3": 1.0}
"""by family: what is added to the weight of its norm"""


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    weight: Tensor
    eps: float
    offset: float


@contextmanager
def fused_norms(model: PreTrainedModel) -> Iterator[None]:
    """In this block, norms of known classes run in one kernel where they can (see `fuses`), with the same rounding; on
    a CPU in one operator of torch, in float32 alone.

    Not in a model with compiled parts, which would be compiled anew when a method of theirs changes.
    """
    replaced = [] if has_compiled_part(model) else [module for module in model.modules() if _known(module)]
    for module in replaced:
        module.forward = functools.partial(_norm, module, module.forward)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _known(module: nn.Module) -> bool:
    family = type(module).__name__.removesuffix("RMSNorm")
    return family in OFFSETS and type(module).__module__.startswith("transformers.") and "forward" not in vars(module)


def norm_of(module: nn.Module) -> Norm | None:
    """What a norm of a known class computes; None for other modules, and those with a forward of another's."""
    inside = vars(module).get("forward")
    ours = isinstance(inside, functools.partial) and inside.func is _norm
    if not (ours or _known(module)) or has_hooks(module):
        return None
    family, weight, eps = _parts(module)
    return Norm(weight, eps, OFFSETS[family])


def _norm(module: nn.Module, plain: functools.partial[Tensor], x: Tensor) -> Tensor:
    if not fuses(x) or x.shape[-1] > MAX_CHANNELS:
        return _in_torch(module, plain, x)
    from sse_convert.kernels.triton.generation.norm import rms_norm

    family, weight, eps = _parts(module)
    rounds = family in ROUND_FIRST
    dtype = torch.promote_types(x.dtype, weight.dtype) if rounds else x.dtype
    normed: Tensor = rms_norm(x, weight, eps, rounds, OFFSETS[family], dtype)
    return normed


def _in_torch(module: nn.Module, plain: functools.partial[Tensor], x: Tensor) -> Tensor:
    family, weight, eps = _parts(module)
    alike = x.dtype == weight.dtype == torch.float32 and OFFSETS[family] == 0.0
    one = alike and x.device.type == "cpu" and not torch.is_grad_enabled()
    return F.rms_norm(x, weight.shape, weight, eps) if one else plain(x)


def _parts(module: nn.Module) -> tuple[str, Tensor, float]:
    """Family, weight and epsilon of a norm."""
    family: Any = type(module).__name__.removesuffix("RMSNorm")
    eps: Any = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return family, module.get_parameter("weight"), eps
