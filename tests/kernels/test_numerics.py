"""Low precision and extreme decays: finite, and as accurate as the definition run in the same precision."""

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BACKENDS, Case, run_with_gradients
from tests.tolerance import assert_as_accurate, relative_error

Inputs = dict[str, Tensor]
EXTREME = (0.0, -1e-6, -5.0, -20.0, -80.0)


def rounded(inputs: Inputs, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    """The inputs in a dtype, and the same numbers in float64. States and router logits are never below float32."""
    low = {n: x.to(torch.float32 if n in ("initial_state", "router_logits") else dtype) for n, x in inputs.items()}
    return low, {name: x.double() for name, x in low.items()}


def assert_all_as_accurate(case: Case, low: Inputs, exact_inputs: Inputs) -> None:
    exact = run_with_gradients(case, "reference", exact_inputs)
    same_dtype = run_with_gradients(case, "reference", low)
    for backend in BACKENDS:
        for name, value in run_with_gradients(case, backend, low).items():
            assert_as_accurate(value, same_dtype[name], exact[name], f"{backend} {name}", 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("delta", [False, True], ids=["gla", "delta"])
def test_low_precision_is_as_accurate_as_the_reference(dtype: torch.dtype, delta: bool) -> None:
    case = Case(lengths=(200, 63), top_k=2, groups=2, dim=16, value_dim=16, decay_scale=1 / 16, delta=delta)
    assert_all_as_accurate(case, *rounded(case.inputs(), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_output_has_the_dtype_of_v_and_states_are_float32(dtype: torch.dtype) -> None:
    low, _ = rounded(Case().inputs(), dtype)
    for backend in ("reference", *BACKENDS):
        result = run_with_gradients(Case(), backend, low)
        assert result["o"].dtype == dtype
        assert result["final"].dtype == torch.float32
        assert all(result[f"d {name}"].dtype == x.dtype for name, x in low.items())


def extreme_inputs(case: Case) -> Inputs:
    """Every decay drawn from none to -80 nats a step, per token, head and channel."""
    inputs = case.inputs()
    for name in ("log_decay", "shared log_decay"):
        inputs[name] = torch.tensor(EXTREME, dtype=torch.float64)[torch.randint(5, inputs[name].shape)]
    return inputs


def test_extreme_mixed_decays_are_finite_and_right_in_float32() -> None:
    case = Case(lengths=(150, 64), top_k=2, dim=16)
    assert_all_as_accurate(case, *rounded(extreme_inputs(case), torch.float32))


@pytest.mark.parametrize("decay", [0.0, -5.0, -80.0, -1e4, -float("inf")])
def test_constant_decays_are_finite_and_right_in_float32(decay: float) -> None:
    case = Case(lengths=(150,), dim=16)
    inputs = case.inputs()
    inputs["log_decay"].fill_(decay)
    inputs["shared log_decay"].fill_(decay)
    assert_all_as_accurate(case, *rounded(inputs, torch.float32))


def test_one_strong_decay_does_not_blur_the_weak_ones_after_it() -> None:
    """Differences of running sums would lose 1e-6 beside -80; products of decays do not."""
    case = Case(lengths=(128,), num_partitions=1, shared=False, dim=16, value_dim=16)
    inputs = case.inputs()
    inputs["log_decay"].fill_(-1e-6)
    inputs["log_decay"][::16] = -80.0
    low, exact = rounded(inputs, torch.float32)
    result, expected = run_with_gradients(case, "varlen", low), run_with_gradients(case, "reference", exact)
    assert relative_error(result["o"], expected["o"]) < 5e-7


def test_vanishing_gates_are_finite() -> None:
    """e underflows to 0 in float32 for a partition that is selected only because k = N."""
    case = Case(lengths=(70,), top_k=4)
    inputs = case.inputs()
    inputs["router_logits"][:, 1] -= 200.0
    low, exact = rounded(inputs, torch.float32)
    assert_all_as_accurate(case, low, exact)
