"""What kernels may do to memory: programs of a launch run in any order, and nothing hangs on what nobody wrote."""

import dataclasses as dc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sse_convert.kernels.triton import autograd as operator
from sse_convert.kernels.triton import routing
from tests.kernels.triton import interpreter
from tests.kernels.triton.trials import Trial, lay_out, results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on this machine")

NOBODY, SEVERAL = -1, -2
GAP = 64
"""elements between the tables of a layout"""
GLA = Trial(lengths=(66, 0, 5), num_partitions=3, top_k=2, k_map="softmax", normalizer=16.0, dtype=torch.bfloat16)
"""one query head and one block of values: with more of them, several programs store the same flag or decay"""


class Watched(interpreter._Memory):
    """Besides, no program may touch what another one of the launch stores."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self.offsets = np.cumsum(self.ends - self.starts, dtype=np.int64) - (self.ends - self.starts).astype(np.int64)
        size = int((self.ends - self.starts).sum())
        self.stored, self.loaded = np.full(size, NOBODY), np.full(size, NOBODY)

    def check(self, ptrs: Any, mask: Any, action: str) -> None:
        super().check(ptrs, mask, action)
        touched = np.atleast_1d(ptrs.data)[np.broadcast_to(mask.data, np.atleast_1d(ptrs.data).shape)]
        if touched.size == 0:
            return
        index = np.searchsorted(self.starts, touched, side="right") - 1
        at = self.offsets[index] + (touched - self.starts[index]).astype(np.int64)
        program, stored, loaded = _program(), self.stored[at], self.loaded[at]
        foreign = (stored != NOBODY) & (stored != program)
        if action == "load":
            self.loaded[at] = np.where((loaded == NOBODY) | (loaded == program), program, SEVERAL)
        else:
            foreign |= (loaded != NOBODY) & (loaded != program)
            self.stored[at] = program
        if foreign.any():
            raise RuntimeError(f"{action} of {foreign.sum()} elements that another program stores or loads")


def _program() -> int:
    from triton.runtime.interpreter import interpreter_builder as builder

    (x, y, z), (_, many, more) = builder.grid_idx, builder.grid_dim
    return (x * many + y) * more + z


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_Memory", Watched)


@triton.jit
def _blocks_kernel(a, out, STRIDE: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * STRIDE + tl.arange(0, N)
    tl.store(out + i, tl.load(a + i))


def test_programs_in_each_others_way_are_noticed() -> None:
    a, out = torch.zeros(32), torch.zeros(32)
    _blocks_kernel[(2,)](a, out, 16, 16)
    for given, action in ((a, "store"), (out, "load")):
        with pytest.raises(Exception, match=f"{action} of 4 elements that another program"):
            _blocks_kernel[(2,)](given, out, 12, 16)


@pytest.mark.parametrize(
    ("trial", "layout"),
    [(GLA, "aligned"), (GLA, "packed"), (dc.replace(GLA, delta=True, k_map="l2"), "aligned")],
    ids=["gla", "gla packed", "delta"],
)
def test_passes_keep_to_their_memory(trial: Trial, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one table of a layout from the next. What was in new memory changes no bit."""
    lay_out(monkeypatch, layout)
    monkeypatch.setattr(operator, "group_chunks", lambda chunks, heads: 1)  # segments of several groups
    monkeypatch.setattr(routing, "_memory", _memory_apart)
    monkeypatch.setattr(routing, "_carve", _carve_apart)
    x = trial.rounded("cpu")
    fill_new_memory(monkeypatch, math.nan, 2**31 - 1)
    first = results(trial, x)
    fill_new_memory(monkeypatch, 0.0, 0)
    for name, tensor in results(trial, x).items():
        assert torch.equal(tensor, first[name]), name


def fill_new_memory(monkeypatch: pytest.MonkeyPatch, number: float, integer: int) -> None:
    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(number if x.is_floating_point() else integer)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


def _memory_apart(lengths: dict[str, int], like: Tensor) -> Tensor:
    return torch.empty(sum(lengths.values()) + len(lengths) * GAP, dtype=torch.int32)


def _carve_apart(memory: Tensor, lengths: dict[str, int]) -> dict[str, Tensor]:
    spaced = memory.split([size for length in lengths.values() for size in (length, GAP)])
    return dict(zip(lengths, spaced[::2], strict=True))
