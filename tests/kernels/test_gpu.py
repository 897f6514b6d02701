"""The torch backends on a GPU: the same numbers as the reference on the CPU, whichever device the offsets are on."""

from itertools import product

import pytest
import torch

from tests.kernels.cases import BACKENDS, Case, run, run_with_gradients
from tests.tolerance import assert_same

pytestmark = pytest.mark.gpu

CASES = (
    Case(lengths=(63, 0, 64, 1, 130), top_k=2, groups=2),
    Case(lengths=(70, 9), num_partitions=8, per_partition=True, shared=False, initial_state=False),
    Case(lengths=(63, 0, 64, 1, 130), top_k=2, groups=2, delta=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("backend", "offsets_on"), list(product(("reference", *BACKENDS), ("cpu", "cuda"))))
def test_equals_the_reference_on_the_cpu(backend: str, offsets_on: str, case: Case) -> None:
    exact = run_with_gradients(case, "reference")
    overrides = {"cu_seqlens": case.cu_seqlens.to(offsets_on)}
    inputs = {name: x.cuda() for name, x in case.inputs().items()}
    for name, value in run_with_gradients(case, backend, inputs, **overrides).items():
        assert value.is_cuda
        assert_same(value.cpu(), exact[name], name)


def test_two_training_steps_on_a_gpu_are_equal_to_the_bit() -> None:
    """One partition per token: no sums whose order the GPU chooses."""
    case = Case(lengths=(300, 200), dim=64, value_dim=64)
    inputs = {name: x.cuda() for name, x in case.inputs(torch.float32).items()}
    first, second = (run_with_gradients(case, "varlen", inputs) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("delta", [False, True], ids=["gla", "delta"])
def test_decoding_in_place_with_offsets_on_the_cpu_needs_no_sync(delta: bool) -> None:
    case = Case(lengths=(1, 1, 1, 1), delta=delta)
    x = {name: t.cuda() for name, t in case.inputs(torch.float32).items()}
    expected_o, expected = run(case, "reference", {name: t.clone() for name, t in x.items()})
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, final = run(case, "auto", x, inplace_state=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(o, expected_o, "o", 1e-5)
    assert_same(final, expected, "final", 1e-5)
