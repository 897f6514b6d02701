"""Every kernel compiles for the architectures people own, spills no more registers than is known, and fits in shared
memory."""

import ast
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import sse_convert.kernels.triton
from sse_convert.kernels.triton.problem import Shape
from tests.kernels.triton.compile_cases import COMPILE_CASES
from tests.kernels.triton.compiling import SHARED_LIMIT, Launch, Report, compile_in_subprocess, richest

BEARABLE_STACK = {
    "prepare_kernel": 192,
    "strong_products_kernel": 208,
    "output_kernel": 256,
    "value_gradient_kernel": 192,
    "finish_kernel": 576,
    "finish_strong_kernel": 3400,
    "scatter_kernel": 8,
}
"""bytes of stack a thread may use; every other kernel, none. Blocks that keep these kernels' tiles whole in registers
are slower on an H200: at 64k tokens, 8 heads, 128 channels, prepare takes 0.77 ms with 32 channels a step and 0.68 with
64 (48 bytes), finish 2.8 against 2.0 (24 bytes). Chunks with strong decays are few. For sm_100 the scatter of 64
partitions puts one register aside, so that six programs share a multiprocessor."""
BEARABLE_IN_FLOAT32 = {
    "prepare_kernel": 12544,
    "strong_products_kernel": 64,
    "value_gradient_kernel": 96,
    "finish_kernel": 2048,
    "finish_strong_kernel": 896,
    "finish_kernel by slot": 2432,
    "inverse_kernel": 368,
    "state_kernel": 8,
    "correct_kernel": 3968,
    "correct_backward_kernel": 6144,
}
"""the same where products are in float32 throughout: that path is for exactness, and has not been made fast"""
BUFFERED = {
    "state_kernel", "scan_kernel", "output_kernel", "value_gradient_kernel", "finish_kernel", "correct_kernel",
    "correct_backward_kernel",
}  # fmt: skip
"""kernels whose loops load ahead"""
LEAST, MOST, TENSOR_MEMORY = 89, 90, 100
"""architectures for which the kernels have tiles of their own"""
FEW = ((80, "decode in slots"), (103, "decode in slots"), (120, "decode in slots"))
"""one case for each of the others on every change, as they have the tiles of those; all cases among the experiments"""
QUICK = tuple(name for name, case in COMPILE_CASES.items() if not case.slow)
EACH_CHOICE = [(capability, case) for capability in (MOST, LEAST) for case in QUICK]
EACH_CHOICE += [(TENSOR_MEMORY, "train")]


def test_each_choice_of_tiles_compiles_without_spills() -> None:
    """Each with most of the features that it is launched with; loops keep their pipelines, no kernel is left out."""
    reports = compile_in_subprocess(FEW, EACH_CHOICE)
    compiled = [report["capability"] for report in reports]
    assert compiled == [80, 103, 120, MOST, LEAST, TENSOR_MEMORY]
    assert set(compiled) == SHARED_LIMIT.keys()
    for report in reports:
        assert_fits(report)
        assert_pipelines(report)
    of_most = reports[compiled.index(MOST)]["kernels"]
    assert {kernel["kernel"] for kernel in of_most if loads_ahead(kernel)} == BUFFERED
    found = {kernel["kernel"] for kernel in of_most}
    assert kernels() == found, f"never compiled: {sorted(kernels() - found)}"


class TestRichest:
    """Which launches stand for all."""

    @staticmethod
    def launch(*args: object, **options: object) -> Launch:
        return Launch(TestRichest.launch, (1,), args, options)

    def test_the_one_with_most_features_of_each_choice(self) -> None:
        few, many = self.launch(1, None, BV=32, GATE=False), self.launch(1, (2, 3), BV=32, GATE=True)
        wider = self.launch(1, None, BV=64, GATE=False)
        assert richest([few, many, wider]) == [many, wider]

    def test_the_first_of_equals(self) -> None:
        first, second = self.launch("a", BV=32), self.launch("b", BV=32)
        assert richest([first, second]) == [first]

    def test_products_in_float32_are_a_choice(self) -> None:
        shapes = [Shape(H=2, G=1, D=64, V=64, C=64, VALUE_P=1, IEEE=exact) for exact in (False, True)]
        launches = [self.launch(BV=32, shape=shape) for shape in shapes]
        assert richest(launches) == launches


@pytest.mark.experiment
@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_compiles_every_configuration_without_spills(capability: int) -> None:
    reports = compile_in_subprocess((capability, case) for case in COMPILE_CASES)
    assert [report["case"] for report in reports] == list(COMPILE_CASES)
    for report in reports:
        assert_fits(report)
        if report["case"] in QUICK:
            assert_pipelines(report)


def assert_fits(report: Report) -> None:
    assert "error" not in report, report["error"]
    assert report["kernels"]
    for kernel in report["kernels"]:
        assert kernel["local"] == 0, f"uses local memory: {kernel}"
        exact = "True" in str(kernel["constants"].get("IEEE"))
        by_slot = " by slot" if exact and "True" in str(kernel["constants"].get("BY_SLOT")) else ""
        bounds, name = BEARABLE_IN_FLOAT32 if exact else BEARABLE_STACK, kernel["kernel"]
        bearable = bounds.get(name + by_slot, bounds.get(name, 0))
        assert kernel["stack"] <= bearable, f"spills registers: {kernel}"
        assert kernel["shared"] <= kernel["limit"], f"too much shared memory: {kernel}"


def assert_pipelines(report: dict) -> None:
    for kernel in report["kernels"]:
        if loads_ahead(kernel):
            assert_pipelined(kernel)


def loads_ahead(kernel: dict[str, Any]) -> bool:
    """Whether a kernel's loop is pipelined: more than one stage, and in `finish_kernel` more than one step over V."""
    sizes = kernel["constants"]
    once = kernel["kernel"].startswith("finish") and sizes["V"] <= sizes["BV"]
    return sizes.get("STAGES", 1) > 1 and not once


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"waits": 0, "buffers": 0}, "waits for every load"),
        ({"waits": 2, "buffers": 1}, "nothing is loaded ahead"),
        ({"waits": 2, "buffers": 2}, "nothing is loaded ahead"),
        ({"waits": 2, "buffers": 3}, ""),
    ],
)
def test_a_lost_pipeline_is_noticed(found: dict[str, int], said: str) -> None:
    """Of four stages: three loads ahead."""
    with pytest.raises(AssertionError, match=said) if said else nullcontext():
        assert_pipelined({"kernel": "scan_kernel", "constants": {"STAGES": 4}, **found})


def assert_pipelined(kernel: dict[str, Any]) -> None:
    """The compiled text waits for loads in flight, and a loop has a buffer for each step that is loaded ahead."""
    stages = kernel["constants"].get("STAGES", 1)
    assert kernel["waits"] > 0, f"waits for every load: {kernel}"
    assert kernel["buffers"] >= max(2, stages - 1), f"nothing is loaded ahead: {kernel}"


def kernels() -> set[str]:
    """Names of all kernels that there are."""
    folder = Path(sse_convert.kernels.triton.__file__).parent
    names = {
        node.name
        for file in folder.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert names
    return names
