"""Calls whose kernels are compiled for each architecture: add one for every configuration that is pinned."""

import dataclasses as dc
from collections.abc import Callable
from functools import partial

import torch

from sse_convert.kernels.triton.routing import select, slot_layout


@dc.dataclass(frozen=True)
class CompileCase:
    """A call on CPU tensors, of which only shapes and dtypes matter."""

    call: Callable[[], object]
    slow: bool = False


def route_tokens(N: int, K: int, dtype: torch.dtype, bias: bool) -> None:
    logits = torch.zeros(16, N, dtype=dtype, requires_grad=True)
    select(logits, torch.zeros(N) if bias else None, K)[1].sum().backward()


def lay_out(N: int, K: int, packed: bool, states: bool, offsets: torch.dtype) -> None:
    slot_layout(
        torch.zeros(100, K, dtype=torch.int32), torch.tensor([0, 30, 100], dtype=offsets), num_partitions=N,
        shared=True, packed=packed, states=states, group_chunks=8,
    )  # fmt: skip


COMPILE_CASES = {
    "select": CompileCase(partial(route_tokens, 4, 1, torch.bfloat16, False)),
    "select of 64": CompileCase(partial(route_tokens, 64, 2, torch.float32, True)),
    "select of 1": CompileCase(partial(route_tokens, 1, 1, torch.float32, False), slow=True),
    "select all of 128": CompileCase(partial(route_tokens, 128, 128, torch.float16, True), slow=True),
    "aligned": CompileCase(partial(lay_out, 4, 1, False, False, torch.int32)),
    "aligned with states": CompileCase(partial(lay_out, 64, 2, False, True, torch.int64)),
    "packed": CompileCase(partial(lay_out, 4, 1, True, False, torch.int64)),
    "packed, 64 partitions": CompileCase(partial(lay_out, 64, 3, True, False, torch.int32), slow=True),
    "aligned, all of 64": CompileCase(partial(lay_out, 64, 64, False, True, torch.int32), slow=True),
    "aligned, 300 partitions": CompileCase(partial(lay_out, 300, 1, False, True, torch.int32), slow=True),
}
