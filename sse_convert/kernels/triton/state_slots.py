"""Copies rows of states between a tensor that holds all requests' and one of their own, and clears them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""elements of one step"""
PROGRAMS = 64
"""of each row, which share its blocks"""


def read_rows(pages: Tensor, slots: Tensor) -> Tensor:
    """States [S, ...] in float32 of rows `slots` [S] of `pages`; zeros for negative slots."""
    states = torch.empty(slots.shape[0], *pages.shape[1:], dtype=torch.float32, device=pages.device)
    _launch(read_kernel, pages, slots, states)
    return states


def write_rows(pages: Tensor, slots: Tensor, states: Tensor) -> None:
    """Puts states [S, ...] into rows `slots` of `pages`."""
    _launch(write_kernel, pages, slots, states.contiguous())


def clear_rows(pages: Tensor, slots: Tensor, past: Tensor) -> None:
    """Zeroes the rows whose `past` is 0."""
    _launch(clear_kernel, pages, slots, past)


def _launch(kernel, pages: Tensor, slots: Tensor, other: Tensor) -> None:
    assert pages[0].is_contiguous(), "what a row holds must be contiguous"
    size = pages[0].numel()
    programs = min(PROGRAMS, triton.cdiv(size, BLOCK))
    if slots.shape[0]:
        with torch.cuda.device_of(pages):
            kernel[(slots.shape[0], programs)](pages, slots, other, pages.stride(0), size, programs, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["size", "programs"])
def read_kernel(pages, slots, states, stride, size, programs, BLOCK: tl.constexpr):
    """states[s] = pages[slots[s]], or 0 where the slot is negative.

    Grid (S, programs). Bytes of an element: 2 (pages in bfloat16) + 4. Tiles: 4096 elements, 32 to a thread of 4 warps;
    64 programs of a row, so that few rows fill the device."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    there = tl.where(slot >= 0, size, 0)
    for block in range(tl.program_id(1), tl.cdiv(size, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(pages + slot * stride + at, mask=at < there, other=0.0)
        tl.store(states + row * size + at, x.to(tl.float32), mask=at < size)


@triton.jit(do_not_specialize=["size", "programs"])
def write_kernel(pages, slots, states, stride, size, programs, BLOCK: tl.constexpr):
    """pages[slots[s]] = states[s] where the slot is not negative.

    Grid (S, programs). Bytes of an element: 4 + 2 (pages in bfloat16). Tiles: as `read_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    for block in range(tl.program_id(1), tl.cdiv(size, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(states + row * size + at, mask=at < size, other=0.0)
        tl.store(pages + slot * stride + at, x.to(pages.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size", "programs"])
def clear_kernel(pages, slots, past, stride, size, programs, BLOCK: tl.constexpr):
    """pages[slots[s]] = 0 where past[s] = 0 and the slot is not negative.

    Grid (S, programs). Bytes of an element that is cleared: 2 (pages in bfloat16). Tiles: as `read_kernel`."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (tl.load(past + row) > 0):
        return
    for block in range(tl.program_id(1), tl.cdiv(size, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(pages + slot * stride + at, tl.zeros([BLOCK], pages.dtype.element_ty), mask=at < size)
