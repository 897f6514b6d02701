"""Every kernel compiles for Ampere and Hopper, keeps its tiles in registers, and fits in shared memory."""

import ast
from pathlib import Path

import pytest

import sse_convert.kernels.triton
from tests.kernels.triton.compile_cases import COMPILE_CASES
from tests.kernels.triton.compiling import SHARED_LIMIT, compile_in_subprocess

QUICK = tuple(name for name, case in COMPILE_CASES.items() if not case.slow)
SLOW = tuple(name for name, case in COMPILE_CASES.items() if case.slow)


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("case", QUICK)
def test_compiles_without_spills(case: str, capability: int) -> None:
    assert_fits(compile_in_subprocess(capability, *QUICK)[case], capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("case", SLOW)
def test_compiles_every_configuration_without_spills(case: str, capability: int) -> None:
    assert_fits(compile_in_subprocess(capability, case)[case], capability)


def assert_fits(report: dict, capability: int) -> None:
    assert "error" not in report, report["error"]
    assert report["kernels"]
    for kernel in report["kernels"]:
        assert kernel["stack"] == kernel["local"] == 0, f"spills registers: {kernel}"
        assert kernel["shared"] <= SHARED_LIMIT[capability], f"too much shared memory: {kernel}"


def test_every_kernel_is_compiled() -> None:
    compiled = {
        kernel["kernel"]
        for report in compile_in_subprocess(90, *QUICK).values()
        for kernel in report.get("kernels", ())
    }
    folder = Path(sse_convert.kernels.triton.__file__).parent
    kernels = {
        node.name
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert kernels
    assert kernels <= compiled, f"never compiled: {sorted(kernels - compiled)}"
