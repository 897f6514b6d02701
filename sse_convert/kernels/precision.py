"""Computing in the types that tensors have, whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context without autocast on a kind of device. Where there is none it is nothing, as entering one takes time.

    Args:
        kind: of device, such as cpu or cuda.
    """
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
