"""What is run under compute-sanitizer launches all there is."""

import pytest

from tests.kernels.triton import every_kernel
from tests.kernels.triton.test_compile import kernels


def test_no_kernel_is_left_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("launches are noted in the interpreter")
    from triton.runtime import interpreter

    launched, call = set(), interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__",
        lambda self, *args, **options: (launched.add(self.fn.__name__), call(self, *args, **options))[1],
    )  # fmt: skip
    every_kernel.main(device, size=16)
    assert launched == kernels()
