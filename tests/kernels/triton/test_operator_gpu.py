"""The chunked kernels at sizes and in ways that only a GPU has: capture, no waiting, long tensors, real shapes."""

import dataclasses as dc
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.triton.config import Widths
from sse_convert.kernels.triton.selfcheck import self_check
from tests.kernels.cases import SHARED_NAMES
from tests.kernels.triton.trials import Inputs, Trial, assert_right, results

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
REAL = Trial(
    lengths=(3000, 0, 1096), heads=2, groups=4, dim=128, value_dim=128, dtype=BF16, k_map="softmax", normalizer=16.0
)


@pytest.mark.parametrize(
    "trial",
    [
        REAL,
        dc.replace(REAL, initial_state=True, top_k=2, k_map="silu"),
        dc.replace(REAL, heads=8, groups=3, dim=64, value_dim=64, num_partitions=64, top_k=2),
        dc.replace(REAL, dtype=torch.float32, heads=1, groups=2, final_state=True),
        dc.replace(REAL, normalizer=None, decays="mixed"),
    ],
    ids=str,
)
def test_real_sizes(trial: Trial) -> None:
    assert_right(trial, trial.rounded("cuda"))


WIDTHS = [32, 48, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("k_map", ["relu", "softmax"])
def test_heads_of_any_width(dim: int, groups: int, k_map: str) -> None:
    """A compiler's mistakes depend on the widths: with 64 channels, a loop of one step over V gave wrong gradients."""
    trial = dc.replace(REAL, lengths=(700, 0, 61, 263), heads=7, groups=groups, dim=dim, value_dim=dim, k_map=k_map)
    assert_right(trial, trial.rounded("cuda"))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dim", WIDTHS)
def test_self_check_passes_heads_of_any_width(dim: int, groups: int, delta: bool) -> None:
    assert self_check(torch.device("cuda"), delta=delta, widths=Widths(groups, dim, dim)) is None


@pytest.mark.parametrize("num_partitions", [4, 64])
@pytest.mark.parametrize("initial_state", [False, True])
def test_every_token_in_one_partition(num_partitions: int, initial_state: bool) -> None:
    """All other partitions are empty."""
    trial = dc.replace(REAL, num_partitions=num_partitions, initial_state=initial_state, target=num_partitions - 1)
    x = trial.rounded("cuda")
    x["router_logits"][:, trial.target] += 100.0
    assert_right(trial, x)


@pytest.mark.parametrize("initial_state", [False, True], ids=["packed", "aligned"])
def test_many_short_sequences(initial_state: bool) -> None:
    trial = dc.replace(
        REAL, lengths=tuple(i % 18 for i in range(600)), heads=1, groups=2, dim=64, value_dim=64,
        initial_state=initial_state,
    )  # fmt: skip
    assert_right(trial, trial.rounded("cuda"))


def test_two_runs_have_the_same_bits() -> None:
    x = REAL.rounded("cuda")
    first, second = results(REAL, x), results(REAL, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def step_of(trial: Trial, x: Inputs) -> Callable[[], dict[str, Tensor]]:
    """Forward and backward from the public entry, with everything on the device and the longest sequence known."""
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    shared = tuple(leaves[name] for name in SHARED_NAMES if name in leaves) or None
    tensors = {name: t for name, t in leaves.items() if name not in SHARED_NAMES}
    options = {**trial.options(), "cu_seqlens": trial.cu_seqlens.to(x["q"].device), "max_seqlen": max(trial.lengths)}

    def step() -> dict[str, Tensor]:
        o, _ = sse_attention(
            **tensors, shared=shared, **options, backend="triton", output_final_state=trial.initial_state
        )
        gradients = torch.autograd.grad(o.float().sum(), list(leaves.values()), materialize_grads=True)
        return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}

    return step


@pytest.mark.parametrize("initial_state", [False, True])
def test_forward_and_backward_never_wait(initial_state: bool) -> None:
    trial = dc.replace(REAL, initial_state=initial_state)
    step = step_of(trial, trial.rounded("cuda"))
    step()  # compiles the kernels and checks the build
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("initial_state", [False, True])
def test_a_captured_step_replays_on_new_inputs(initial_state: bool) -> None:
    trial = dc.replace(REAL, initial_state=initial_state)
    x = trial.rounded("cuda")
    step = step_of(trial, x)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = dc.replace(trial, seed=5).rounded("cuda")
    with torch.no_grad():
        for name, tensor in x.items():
            tensor.copy_(other[name])
    graph.replay()
    torch.cuda.synchronize()
    for name, value in step_of(trial, other)().items():
        assert torch.equal(captured[name], value), name


@pytest.mark.parametrize("initial_state", [False, True], ids=["packed", "aligned"])
def test_offsets_beyond_int32(initial_state: bool) -> None:
    """More than 2^31 elements in q, k, v and all between: the last sequence has the values it has alone.

    Bit for bit where sequences do not share chunks; where they do, rounding depends on what stands before, and both
    are as far from the exact values as bfloat16 may be.
    """
    gc.collect()
    torch.cuda.empty_cache()  # what the tests before this one leave with torch counts as taken
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free memory on the GPU")
    last, heads, dim = 256, 64, 256
    long = (2**31 // (heads * dim) // 64 + 1) * 64
    trial = Trial(
        lengths=(last,), heads=heads, dim=dim, value_dim=dim, num_partitions=2, shared=False, dtype=BF16,
        k_map="softmax", normalizer=16.0, initial_state=initial_state,
    )  # fmt: skip
    assert_last_as_alone(trial, long, "cuda", bits=initial_state)


def assert_last_as_alone(trial: Trial, long: int, device: str, *, bits: bool) -> None:
    """Outputs and gradients of a sequence behind `long` tokens of noise, against those it has alone."""
    alone = trial.rounded(device)
    expected = step_of(trial, alone)()
    x = {name: _after_noise(tensor, 1 if name == "initial_state" else long) for name, tensor in alone.items()}
    for name, value in step_of(dc.replace(trial, lengths=(long, *trial.lengths)), x)().items():
        found, wanted = value[-len(expected[name]) :], expected[name]
        if bits:
            assert torch.equal(found, wanted), name
        else:
            error = (found.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 2 * 5e-3, f"{name}: {error:.1e}"


def _after_noise(tensor: Tensor, tokens: int) -> Tensor:
    """`tokens` rows of noise, made on the device, then the tensor."""
    whole = torch.empty(tokens + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    generator = torch.Generator(tensor.device).manual_seed(3)
    whole[:tokens].normal_(generator=generator)
    whole[tokens:] = tensor.detach()
    return whole
