"""States of many requests in one tensor, each in its own row: read, written and cleared by slot, as servers keep them.

Rows may lie apart (other things between them) and be in bfloat16; what one row holds is contiguous. Negative slots
stand for nothing: they read zeros and write nothing. On a GPU each is one launch and nothing waits for the device.
"""

import torch
from torch import Tensor

from sse_convert.kernels.triton_backend import has_kernels


def read_states(pages: Tensor, slots: Tensor) -> Tensor:
    """The states [S, ...] in float32 of some rows.

    Args:
        pages: [slots, ...] float32 or bfloat16.
        slots: integer [S].
    """
    if has_kernels(pages):
        from sse_convert.kernels.triton.state_slots import read_rows

        rows: Tensor = read_rows(pages, slots)
        return rows
    states = pages[slots.clamp_min(0).long()].float()
    return states.where((slots >= 0).view(-1, *[1] * (pages.dim() - 1)), 0.0)


def write_states(pages: Tensor, slots: Tensor, states: Tensor) -> None:
    """Put the states [S, ...] into their rows, rounded to the type of `pages`. For arguments see `read_states`."""
    if has_kernels(pages):
        from sse_convert.kernels.triton.state_slots import write_rows

        write_rows(pages, slots, states)
        return
    held = slots >= 0
    pages[slots[held].long()] = states[held].to(pages.dtype)


def clear_states(pages: Tensor, slots: Tensor, past: Tensor) -> None:
    """Zero the rows of requests without a past: what is there is of a request that has gone.

    Args:
        pages: as for `read_states`.
        slots: integer [S].
        past: integer [S], tokens that each request has seen.
    """
    if has_kernels(pages):
        from sse_convert.kernels.triton.state_slots import clear_rows

        clear_rows(pages, slots, past)
        return
    new = (past == 0) & (slots >= 0)
    pages[slots[new].long()] = torch.zeros((), dtype=pages.dtype, device=pages.device)
