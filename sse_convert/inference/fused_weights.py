"""Weights that kernels of a step may read where they are: those of modules that are no more than their class says."""

from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.modeling.compat import is_bare
from sse_convert.modeling.initialise import NewProjection, PreciseProjection

PROJECTIONS = (nn.Linear, NewProjection, PreciseProjection)
FEW_ROWS = 4
"""of a step, up to which each reads the weights anew from the device's cache; with more, libraries are faster"""
Pair = tuple[Tensor, Tensor | None]
"""weight [out, in] and bias [out] of a projection"""


class NotFusedError(Exception):
    """Says what of a layer stays as it is, and why."""


def is_transformers(module: nn.Module, name: str) -> bool:
    """Whether a module is of the class of transformers with this name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("transformers.")


def plain_tensor(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor that a kernel can read.

    Args:
        tensor: a parameter.
        dtype: what it must have.
        name: for the message.

    Raises:
        NotFusedError: another dtype, in pieces, quantised, or on no device.
    """
    inner = tensor.detach()
    if type(inner) not in (Tensor, nn.Parameter) or inner.dtype != dtype or not inner.is_contiguous() or inner.is_meta:
        raise NotFusedError(f"{name} is a {type(inner).__name__} in {inner.dtype}, the model is in {dtype}")
    return inner


def added(x: Tensor, output: Pair, residual: Tensor) -> Tensor:
    """residual [rows, out] + the projection of x [rows, in]."""
    from sse_convert.kernels.triton.generation.added_product import added_product

    weight, bias = output
    if len(x) <= FEW_ROWS:
        return added_product(x.contiguous(), weight, bias, residual, None, 1, 0.0)
    return torch.addmm(residual if bias is None else residual + bias, x, weight.T)


def projection(owner: nn.Module, name: str, dtype: torch.dtype) -> Pair:
    """Weight and bias of one of a module's projections.

    Raises:
        NotFusedError: something stands around it (an adapter, a hook, quantisation), or it is in another dtype.
    """
    module: Any = getattr(owner, name)
    if type(module) not in PROJECTIONS or not is_bare(module):
        raise NotFusedError(f"{name} is a {type(module).__name__} that is more than its weight")
    bias = None if module.bias is None else plain_tensor(module.bias, dtype, f"bias of {name}")
    return plain_tensor(module.weight, dtype, name), bias
