"""Attention of one token per request over its ring, beside what torch does with the same ring."""

import pytest
import torch

from sse_convert.kernels.triton.generation.ring_attention import ring_attention
from sse_convert.serving.batch import batch_of
from sse_convert.serving.ring import RingWindow, window_steps
from tests.tolerance import assert_same

PAST = (0, 1, 2, 3, 30, 70, 71, 500)
"""within the sinks, in a window that is not full, in one that is, and at the border between the two"""
SLOTS = (4, 2, 9, 1, 7, 3, 8, 6)


@pytest.mark.parametrize(
    ("window", "sinks", "heads", "groups", "dim", "dtype", "kept", "soft_cap"),
    [
        (68, 3, 2, 2, 16, torch.float32, torch.float32, None),
        (5, 0, 1, 3, 20, torch.float32, torch.float32, 2.0),
        (70, 2, 1, 17, 24, torch.bfloat16, torch.bfloat16, None),
        (64, 2, 2, 1, 64, torch.float32, torch.bfloat16, 30.0),
    ],
)
def test_equals_torch(
    window: int, sinks: int, heads: int, groups: int, dim: int, dtype: torch.dtype, kept: torch.dtype,
    soft_cap: float | None, device: str,
) -> None:  # fmt: skip
    w = RingWindow(window=window, sinks=sinks, scale=0.3, soft_cap=soft_cap)
    rows = torch.randn(11, *w.shape(heads, dim)).to(kept)
    held = w.held(torch.tensor(PAST) - 1) >= 0
    for slot, there in zip(SLOTS, held, strict=True):
        rows[slot, :, ~there] = torch.nan  # nobody may read what a request has not written
    mixed = torch.randn(len(PAST), (groups + 2) * heads, dim).to(dtype)
    q, k, v = mixed.split([groups * heads, heads, heads], 1)  # a token's heads, with others' between the tokens
    ours, batch = rows.to(device), batch_of(len(PAST), [1] * len(PAST), list(SLOTS), list(PAST), device)
    settings = {"window": window, "sinks": sinks, "scale": 0.3, "soft_cap": soft_cap}
    o = ring_attention(*(x.to(device) for x in (q, k, v)), ours, batch.slots, batch.past, **settings)

    exact = rows.double().nan_to_num()
    before = batch_of(len(PAST), [1] * len(PAST), list(SLOTS), list(PAST), "cpu")
    expected = window_steps(w, q.double(), k.to(kept).double(), v.to(kept).double(), exact, before)
    assert o.dtype == dtype
    assert_same(o.cpu(), expected, "o", 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
    assert torch.equal(ours.cpu().double().nan_to_num(), exact)


@pytest.mark.parametrize("past", [0, -1], ids=["without a past", "before a past"])
def test_padding_writes_row_0(past: int, device: str) -> None:
    memory = torch.zeros(4, 2, 6, 1, 16, device=device)
    rows = memory[1:]
    q, k = torch.randn(2, 2, 16, device=device), torch.randn(2, 1, 16, device=device)
    slots, pasts = torch.tensor([-1, 2], device=device), torch.tensor([past, 3], device=device)
    o = ring_attention(q, k, k, rows, slots, pasts, window=4, sinks=2, scale=1.0, soft_cap=None)
    assert o.isfinite().all()
    assert not memory[0].any(), "what lies before the rows is not theirs"
    assert not rows[1].any()
    assert rows[2, :, 3].any()
