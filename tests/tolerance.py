"""How close is close: relative errors in float64, and no tolerance that hides a NaN."""

from torch import Tensor


def relative_error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact|| in float64. A NaN or inf on either side fails."""
    assert x.shape == exact.shape, f"shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
    assert x.isfinite().all(), "non-finite values"
    assert exact.isfinite().all(), "non-finite expected values"
    return ((x.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def assert_same(x: Tensor, exact: Tensor, name: str, tolerance: float = 1e-10) -> None:
    """Relative error at most `tolerance`; a result that is exactly zero may be off by a hundredth of it, absolutely."""
    if exact.count_nonzero() == 0:
        assert x.shape == exact.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
        assert x.numel() == 0 or x.abs().max() <= tolerance / 100, f"{name}: {x.abs().max():.1e}, expected zeros"
        return
    error = relative_error(x, exact)
    assert error <= tolerance, f"{name}: relative error {error:.2e} exceeds {tolerance:.0e}"


def assert_as_accurate(
    kernel: Tensor, same_dtype: Tensor, exact: Tensor, name: str, factor: float = 3.0, floor: float = 1e-6
) -> None:
    """The kernel may be `factor` times less accurate than the reference run in the same dtype."""
    error, budget = relative_error(kernel, exact), max(floor, factor * relative_error(same_dtype, exact))
    assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e}"
