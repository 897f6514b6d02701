"""Whether a forward runs or is being recorded."""

import torch


def traced() -> bool:
    """Whether this forward is compiled by `torch.compile` or captured in a CUDA graph, so that no value may be read."""
    if torch.compiler.is_compiling():
        return True
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()
