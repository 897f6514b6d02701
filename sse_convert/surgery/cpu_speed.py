"""How fast this CPU is, measured in a moment."""

import functools
import statistics
import time

import torch

REACHED = 0.6
"""of the speed of large products, by a model's forward pass; SmolLM2 on two cores reaches 0.5 to 0.7"""
_SHAPE = 512, 1024, 2048
_CPU = torch.device("cpu")


def cpu_alone() -> bool:
    """Whether this machine computes on its CPU."""
    from sse_convert.checkpoints.load_model import pick_device

    return pick_device(None).type == "cpu"


def fast_in_bfloat16(device: torch.device = _CPU) -> bool:
    """Whether a device has units for products in bfloat16, as GPUs do, and a CPU as far as this torch tells; without
    them it is slower there than in float32."""
    if device.type != "cpu":
        return True
    told: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(told.get("amx_bf16"))


@functools.cache
def forward_flops_per_second(dtype: torch.dtype) -> float:
    """FLOP/s that a model's forward pass will reach about, of a tenth of a second of products."""
    rows, inner, columns = _SHAPE
    a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    taken: list[float] = []
    while len(taken) < 9:
        start = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - start)
    return REACHED * 2 * rows * inner * columns / statistics.median(taken[1:])
