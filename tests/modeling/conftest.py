"""Shared set-up of the model tests."""

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def float64_softmax() -> Iterator[None]:
    """Eager attention (Gemma 2's only one) takes its softmax in float32 even in float64 models, where tests are exact
    and masked rows would turn into NaN; here it keeps float64.
    """
    softmax = torch.nn.functional.softmax

    def precise(x: torch.Tensor, *args, dtype: torch.dtype | None = None, **kwargs) -> torch.Tensor:
        return softmax(x, *args, dtype=torch.float64 if x.dtype == torch.float64 else dtype, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", precise)
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers in the test log."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def pytest_configure(config: pytest.Config) -> None:
    """Marks of transformers' own checks."""
    for mark in ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: set by transformers")
