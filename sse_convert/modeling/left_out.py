"""Stands in a checkpoint's code for what does not travel, since the same is computed without it: Triton kernels, steps
of one token in few operators, the definition, split and packed rows, and states that a server keeps.

`remote_code` puts this file in their place; the package itself has them all.
"""

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sse_convert.errors import UsageError
from sse_convert.modeling.compat import GrowingLayer

GPU = "cuda"
DOCUMENT_ATTENTION = "sse_documents"
_INSTEAD = "import sse_convert before the model is loaded, whose own classes have it"


def unavailable_reason(device: torch.device, *_: Any) -> str:
    """Why Triton kernels do not run."""
    if device.type == GPU and not torch.compiler.is_compiling():
        _warn_of_speed()
    return f"the code of a checkpoint has no Triton kernels: {_INSTEAD}"


@functools.cache
def _warn_of_speed() -> None:
    warnings.warn(f"SSE layers run in PyTorch alone, without Triton kernels: {_INSTEAD}", stacklevel=2)


def untrusted(x: Any) -> str:
    """`unavailable_reason` of some inputs."""
    return unavailable_reason(x.q.device)


def unsupported_reason(x: Any) -> None:
    """That kernels are missing is said by `untrusted`."""


def has_kernels(*_: Any) -> bool:
    """Whether kernels run, or a step of one token is computed in another way than rows are: never."""
    return False


fuses = can_step = has_kernels
RoomyLayer = GrowingLayer


def current_shard() -> None:
    """Rows are whole."""


def stepping(model: Any) -> AbstractContextManager[None]:
    """Nothing surrounds `generate`."""
    return nullcontext()


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_LeftOut,), {})


class _LeftOut:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(f"{type(self).__name__} is not in the code of a checkpoint", fix=_INSTEAD)
