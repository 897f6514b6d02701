"""States that live in rows of a larger tensor: the operator reads and overwrites those rows, and no others."""

import dataclasses as dc

import pytest
import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.state_slots import clear_states, read_states, write_states
from sse_convert.kernels.triton.state_slots import clear_rows, read_rows, write_rows
from tests.kernels.cases import SHARED_NAMES, Case, run

STEP = Case(lengths=(1, 1, 1), dim=16, value_dim=16, top_k=2)
CASES = {
    "step": STEP,
    "step, delta": dc.replace(STEP, delta=True),
    "rows": dc.replace(STEP, lengths=(5, 1, 70)),
    "rows, delta": dc.replace(STEP, lengths=(5, 1, 70), delta=True),
}
SLOTS = torch.tensor([4, 0, 2], dtype=torch.int32)


def pages_of(states: Tensor, slots: Tensor, rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that lie apart, of NaN but for those of `slots`."""
    size = states[0].numel()
    memory = torch.full((rows, size + 24), float("nan"), dtype=dtype, device=states.device)
    pages = memory[:, :size].view(rows, *states.shape[1:])
    pages[slots.long()] = states.to(dtype)
    return pages


@pytest.mark.parametrize("backend", ["varlen", "recurrent", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_equals_states_of_their_own(name: str, backend: str, device: str) -> None:
    case = CASES[name]
    if backend == "recurrent" and max(case.lengths) > 1:
        pytest.skip("a backend for single tokens")
    inputs = {key: x.float() for key, x in case.inputs().items()}
    expected_o, expected = run(case, "reference", {key: x.double() for key, x in inputs.items()})
    x = {key: tensor.to(device) for key, tensor in inputs.items()}
    x["initial_state"] = pages = pages_of(x["initial_state"], SLOTS)
    given = {"max_seqlen": max(case.lengths), "state_slots": SLOTS.to(device), "inplace_state": True}
    o, final = run(case, backend, x, **given)
    assert final is pages
    torch.testing.assert_close(o.double().cpu(), expected_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pages[SLOTS.long()].double().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert pages[[1, 3]].isnan().all()


@pytest.mark.parametrize("backend", ["recurrent", "triton"])
def test_padding_has_no_state(backend: str, device: str) -> None:
    """A negative slot: as in a recorded step of more rows than there are requests."""
    x = {key: tensor.float().to(device) for key, tensor in STEP.inputs().items()}
    given = x["initial_state"].clone()
    expected, final = run(STEP, "recurrent", x, max_seqlen=1)
    slots = torch.tensor([1, -1, 0], device=device)
    x["initial_state"] = pages = pages_of(given[[2, 0]], torch.tensor([0, 1]), rows=3)
    o, _ = run(STEP, backend, x, max_seqlen=1, state_slots=slots, inplace_state=True)
    torch.testing.assert_close(o[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pages[[1, 0]], final[[0, 2]], rtol=1e-4, atol=1e-5)
    assert pages[2].isnan().all()


@pytest.mark.parametrize("delta", [False, True])
def test_states_in_bfloat16_are_rounded_where_they_are_kept(delta: bool, device: str) -> None:
    case = dc.replace(STEP, delta=delta)
    x = {key: tensor.float().to(device) for key, tensor in case.inputs().items()}
    x["initial_state"] = x["initial_state"].bfloat16().float()
    expected, final = run(case, "recurrent", x, max_seqlen=1)
    x["initial_state"] = pages = pages_of(x["initial_state"], SLOTS, dtype=torch.bfloat16)
    o, _ = run(case, "triton", x, max_seqlen=1, state_slots=SLOTS.to(device), inplace_state=True)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pages[SLOTS.long()], final.bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_written_and_cleared(dtype: torch.dtype, device: str) -> None:
    """By torch and by kernels, which agree to the bit; 5000 elements are more than a block."""
    slots, past = torch.tensor([3, -1, 1, 0]), torch.tensor([0, 0, 7, 5])
    states = torch.randn(4, 5, 1000)
    by_torch = pages_of(states[[0, 2, 3]], slots[slots >= 0], dtype=dtype)
    by_kernel = by_torch.clone().to(device)
    on_device = slots.to(device)
    read = read_states(by_torch, slots)
    assert torch.equal(read[[0, 2, 3]], states[[0, 2, 3]].to(dtype).float())
    assert not read[1].any()
    assert torch.equal(read_rows(by_kernel, on_device).cpu(), read)
    write_states(by_torch, slots, 2 * states)
    write_rows(by_kernel, on_device, (2 * states).to(device))
    assert torch.equal(by_torch[[0, 1, 3]], (2 * states[[3, 2, 0]]).to(dtype))
    clear_states(by_torch, slots, past)
    clear_rows(by_kernel, on_device, past.to(device))
    assert not by_torch[3].any()
    assert by_torch[:2].all()
    torch.testing.assert_close(by_kernel.cpu(), by_torch, rtol=0, atol=0, equal_nan=True)


def test_what_is_wrong_is_said() -> None:
    x = {key: tensor.float() for key, tensor in STEP.inputs().items()}
    x = {key: tensor for key, tensor in x.items() if key not in SHARED_NAMES}
    x["initial_state"] = x["initial_state"][:, :4]
    options = {**STEP.options(), "state_slots": SLOTS}
    with pytest.raises(UsageError, match="state_slots without inplace_state"):
        sse_attention(**x, **options)
    with pytest.raises(ShapeError, match="state_slots is torch"):
        sse_attention(**x, **{**options, "state_slots": SLOTS[:2]}, inplace_state=True)
    with pytest.raises(UsageError, match="state_slots with initial_state float64"):
        sse_attention(**{**x, "initial_state": x["initial_state"].double()}, **options, inplace_state=True)
