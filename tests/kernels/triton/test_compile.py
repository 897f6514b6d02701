"""Every kernel compiles for Ampere and Hopper, keeps its tiles in registers, and fits in shared memory."""

import ast
from pathlib import Path

import pytest

import sse_convert.kernels.triton
from tests.kernels.triton.compile_cases import COMPILE_CASES
from tests.kernels.triton.compiling import SHARED_LIMIT, compile_in_subprocess

CASES = [pytest.param(name, marks=pytest.mark.slow if case.slow else ()) for name, case in COMPILE_CASES.items()]


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case: str, capability: int) -> None:
    compiled = compile_in_subprocess(capability, [case])
    assert compiled
    for kernel in compiled:
        assert kernel["stack"] == kernel["local"] == 0, f"spills registers: {kernel}"
        assert kernel["shared"] <= SHARED_LIMIT[capability], f"too much shared memory: {kernel}"


def test_every_kernel_is_compiled_somewhere() -> None:
    compiled = {kernel["kernel"] for kernel in compile_in_subprocess(90, list(COMPILE_CASES))}
    folder = Path(sse_convert.kernels.triton.__file__).parent
    kernels = {
        node.name
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert kernels
    assert kernels <= compiled, f"never compiled: {sorted(kernels - compiled)}"
