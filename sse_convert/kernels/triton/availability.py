"""Whether the Triton kernels can be trusted on a device of this machine, and if not, why."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import torch

from sse_convert.kernels.triton.config import USUAL, Widths

LOWEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 tensor cores"""

_reasons: dict[tuple[int, Widths, bool], str | None] = {}
"""by index of the device, widths of heads, and whether under the delta rule"""


def untrusted_reason(device: torch.device, *, delta: bool = False, widths: Widths | None = None) -> str | None:
    """Why the kernels (those of the delta rule too, if `delta`) cannot run on `device`; None if they can.

    The first call for a GPU and some widths runs the self-check, which compiles kernels and waits for the device, since
    a compiler's mistakes depend on the widths. Later ones only look its result up. The delta rule has a check of its
    own, whose kernels are compiled apart. For kernels that no check runs (`widths` None) a check that any widths passed
    will do, or that of the usual ones. A CPU will do in Triton's interpreter (TRITON_INTERPRET=1), which is slow and
    meant for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels need an NVIDIA GPU, not {'an AMD one' if device.type == 'cuda' else device.type}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    index = torch.cuda.current_device() if device.index is None else device.index
    passed = (reason is None for (place, *_), reason in _reasons.items() if place == index)
    if widths is None and not delta and any(passed):
        return None
    key = (index, widths or USUAL, delta)
    if key not in _reasons:
        if torch.cuda.is_current_stream_capturing():
            return "the self-check has not run, and cannot while a CUDA graph is being captured"
        _reasons[key] = _examine(*key)
    return _reasons[key]


def _examine(index: int, widths: Widths, delta: bool) -> str | None:
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if capability < LOWEST_CAPABILITY:
        lowest = ".".join(map(str, LOWEST_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}, below {lowest}"
    from sse_convert.kernels.triton.selfcheck import self_check

    with torch.cuda.device(index), _waiting_allowed():
        wrong = self_check(torch.device("cuda", index), delta=delta, widths=widths)
    return None if wrong is None else f"self-check failed on {name}{_heads(widths)}: {wrong}; {_toolchain(capability)}"


def _heads(widths: Widths) -> str:
    """What an error says of widths that few models have."""
    return "" if widths == USUAL else f" for heads of {widths.dim} x {widths.value_dim}, {widths.groups} to a state"


@contextlib.contextmanager
def _waiting_allowed() -> Iterator[None]:
    """Let the host wait for the device, also where a caller's debug mode forbids it to. Torch warns where it is set."""
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _toolchain(capability: tuple[int, int]) -> str:
    """Versions of what compiled the kernels, and how to replace it."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(10 * capability[0] + capability[1])
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if "blackwell" in os.path.basename(tool.path) else "TRITON_PTXAS_PATH"
    return (
        f"compiled by triton {triton.__version__} with ptxas {tool.version} ({tool.path}): "
        f"set {variable} to the ptxas of a newer CUDA toolkit (13.1 or later), or install another triton"
    )
