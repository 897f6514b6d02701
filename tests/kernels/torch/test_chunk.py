"""The chunked engine against a plain recurrence, for every chunk size and every way to cut the work."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.torch import chunk as chunked
from sse_convert.kernels.torch.chunk import gated_linear_attention
from sse_convert.kernels.torch.chunk_layout import chunk_layout
from tests.tolerance import assert_same

LENGTHS = (7, 0, 33, 1, 16, 15, 17, 0, 64)


def make_inputs(lengths: tuple[int, ...], G: int = 2, H: int = 2, D: int = 4, V: int = 3) -> list[Tensor]:
    T = sum(lengths)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    log_decay = F.logsigmoid(normal(T, H, D))
    return [normal(T, H, G, D), normal(T, H, D), normal(T, H, V), log_decay, normal(len(lengths), H, D, V)]


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outs, finals = [], []
    for s in range(len(cu_seqlens) - 1):
        S = state[s]
        for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])):
            S = log_decay[t].exp()[..., None] * S + k[t][..., None] * v[t][:, None]
            outs.append(q[t] @ S)
        finals.append(S)
    return torch.stack(outs), torch.stack(finals)


def results(function: object, inputs: list[Tensor], lengths: tuple[int, ...], **options: int) -> list[Tensor]:
    assert callable(function)
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = function(*leaves[:4], offsets(lengths), leaves[4], **options)
    loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + final.square().sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("slab_bytes", [1, 2**12, 2**20])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_every_chunk_and_slab_size_equals_the_recurrence(
    chunk_size: int, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked.SLAB_BYTES, "cpu", slab_bytes)
    inputs = make_inputs(LENGTHS)
    exact = results(recurrence, inputs, LENGTHS)
    for i, value in enumerate(results(gated_linear_attention, inputs, LENGTHS, chunk_size=chunk_size)):
        assert_same(value, exact[i], f"result {i}")


@pytest.mark.parametrize("slab_bytes", [1, 2**12])
def test_slabs_do_not_change_a_bit(slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(LENGTHS, D=8, V=4)
    whole = results(gated_linear_attention, inputs, LENGTHS, chunk_size=16)
    monkeypatch.setitem(chunked.SLAB_BYTES, "cpu", slab_bytes)
    parts = results(gated_linear_attention, inputs, LENGTHS, chunk_size=16)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_gradients_match_finite_differences() -> None:
    inputs = [x.requires_grad_() for x in make_inputs((5, 0, 3), G=1, H=1, D=2, V=2)]

    def operator(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return gated_linear_attention(q, k, v, log_decay, offsets((5, 0, 3)), state, chunk_size=4)

    assert torch.autograd.gradcheck(operator, tuple(inputs))


def test_layout_gives_every_token_one_place_and_every_segment_its_own_chunks() -> None:
    H, C, T = 2, 16, sum(LENGTHS)
    layout = chunk_layout(offsets(LENGTHS), H, C, rows_per_slab=100, device=torch.device("cpu"))
    rows = torch.cat([slab.rows for slab in layout.slabs])
    real = rows[rows < T * H]
    assert torch.equal(real.sort().values, torch.arange(T * H))
    assert sum(sum(slab.alive) for slab in layout.slabs) == sum(-(-n // C) for n in LENGTHS)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for chunk in rows.view(-1, C):
        tokens = chunk[chunk < T * H] // H
        assert segment[tokens].unique().numel() == 1
        assert torch.equal(tokens, torch.arange(int(tokens[0]), int(tokens[0]) + len(tokens)))


def test_slabs_hold_at_least_one_step_and_at_most_what_was_asked() -> None:
    layout = chunk_layout(offsets((64, 32, 16)), 1, 16, rows_per_slab=48, device=torch.device("cpu"))
    assert [slab.alive for slab in layout.slabs] == [[3], [2, 1], [1]]


def test_backward_keeps_inputs_and_states_only() -> None:
    """What a training step holds between forward and backward: nothing of size [T, C] and no copy of an input."""
    inputs = [x.requires_grad_() for x in make_inputs((256,), G=1, D=16, V=16)]
    saved: list[Tensor] = []

    def remember(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        gated_linear_attention(*inputs[:4], offsets((256,)), inputs[4], chunk_size=64)
    known = {x.data_ptr() for x in inputs}
    own = [x for x in saved if x.data_ptr() not in known]
    assert sum(x.numel() for x in own) == (256 // 64) * 2 * 16 * 16  # the state before each chunk
