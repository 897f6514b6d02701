"""What torch does around a computation: autocast and recording; and names of custom operators that do not clash."""

import re
from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context without autocast on a kind of device. Where there is none it is nothing, as entering one takes time.

    Args:
        kind: of device, such as cpu or cuda.
    """
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def traced() -> bool:
    """Whether this forward is compiled by `torch.compile` or captured in a CUDA graph, so that no value may be read."""
    if torch.compiler.is_compiling():
        return True
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def operator_name(module: str, name: str) -> str:
    """The qualified name under which a module registers an operator with torch.

    Args:
        module: `__name__` of the registering module.
        name: name of the operator.
    """
    return f"sse_{re.sub(r'[^A-Za-z0-9]', '_', module)}::{name}"
