"""The kernels are refused where they cannot run and where the self-check finds them wrong, with the reason in words."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch.operands import operands_of
from sse_convert.kernels.torch.varlen import sse_attention_varlen
from sse_convert.kernels.triton import availability, launching, selfcheck
from sse_convert.kernels.triton.availability import untrusted_reason
from sse_convert.kernels.triton.config import USUAL, Widths
from sse_convert.kernels.triton.selfcheck import self_check

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def right(x: Inputs) -> tuple[Tensor, Tensor]:
    o_THGV, final = sse_attention_varlen(operands_of(x))
    return o_THGV.flatten(1, 2).to(x.v.dtype), final


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch in the place of the kernels, to be sabotaged, on few tokens."""
    monkeypatch.setattr(selfcheck, "_kernels", right)
    monkeypatch.setattr(selfcheck, "OFFSETS", (0, 32, 32, 40))
    return monkeypatch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with one GPU on which the self-check finds nothing."""
    monkeypatch.setattr(availability, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail("torch would warn"))
    monkeypatch.setattr(selfcheck, "self_check", lambda device, delta, widths: None)
    return monkeypatch


def test_self_check_passes_what_is_right(kernels: pytest.MonkeyPatch) -> None:
    assert self_check(CPU) is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_self_check_passes_in_any_mode_and_leaves_random_numbers_alone(kernels: pytest.MonkeyPatch, mode) -> None:
    before = torch.get_rng_state()
    with mode():
        assert self_check(CPU) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_definition_runs_in_one_thread(kernels: pytest.MonkeyPatch) -> None:
    """On ten cores its small products took a minute."""
    threads: dict[str, int] = {}

    def counted(name: str, run: Callable[[Inputs], tuple[Tensor, Tensor]]) -> None:
        def noted(x: Inputs) -> tuple[Tensor, Tensor]:
            threads[name] = torch.get_num_threads()
            return run(x)

        kernels.setattr(selfcheck, name, noted)

    def in_one_thread(x: Inputs) -> tuple[Tensor, Tensor]:
        """What stands for the kernels, without threads that wait for each other."""
        torch.set_num_threads(1)
        try:
            return right(x)
        finally:
            torch.set_num_threads(2)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        counted("_reference", selfcheck._reference)
        counted("_kernels", in_one_thread)
        assert self_check(CPU) is None
    finally:
        torch.set_num_threads(before)
    assert threads == {"_reference": 1, "_kernels": 2}


def test_self_check_passes_inside_a_gradient_checkpoint(kernels: pytest.MonkeyPatch) -> None:
    found = []

    def layer(x: Tensor) -> Tensor:
        y = x.sin()
        if not found:
            found.append(self_check(CPU))
        return y.cos()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert found == [None]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


def test_self_check_names_a_wrong_output_and_its_error(kernels: pytest.MonkeyPatch) -> None:
    def wrong(x: Inputs) -> tuple[Tensor, Tensor]:
        o, final = right(x)
        return o * 1.1, final

    kernels.setattr(selfcheck, "_kernels", wrong)
    assert "is off by 1.0e-01 of its size (bound 1e-02)" in str(self_check(CPU))


def test_self_check_names_a_wrong_gradient(kernels: pytest.MonkeyPatch) -> None:
    def wrong(x: Inputs) -> tuple[Tensor, Tensor]:
        x.k.register_hook(lambda grad: grad * 0.7)
        return right(x)

    kernels.setattr(selfcheck, "_kernels", wrong)
    assert self_check(CPU) == "the gradient of k is off by 3.0e-01 of its size (bound 1e-02)"


def test_self_check_sees_a_nan(kernels: pytest.MonkeyPatch) -> None:
    def wrong(x: Inputs) -> tuple[Tensor, Tensor]:
        o, final = right(x)
        return o, final.index_fill(0, torch.tensor([1]), float("nan"))

    kernels.setattr(selfcheck, "_kernels", wrong)
    assert self_check(CPU) == "the final state is off by inf of its size (bound 1e-02)"


def test_self_check_sees_runs_that_differ(kernels: pytest.MonkeyPatch) -> None:
    calls = []

    def changing(x: Inputs) -> tuple[Tensor, Tensor]:
        calls.append(x)
        o, final = right(x)
        return o, final + 1e-6 * len(calls) * final.detach()

    kernels.setattr(selfcheck, "_kernels", changing)
    assert self_check(CPU) == "two runs differ in the final state"


def test_self_check_survives_a_failing_compiler(kernels: pytest.MonkeyPatch) -> None:
    def broken(x: Inputs) -> tuple[Tensor, Tensor]:
        raise RuntimeError("ptxas died\nof many causes")

    kernels.setattr(selfcheck, "_kernels", broken)
    assert self_check(CPU) == "RuntimeError: ptxas died"


def test_a_right_gpu_is_examined_once(gpu: pytest.MonkeyPatch) -> None:
    examined = []
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: examined.append(device))
    assert untrusted_reason(GPU) is None
    assert untrusted_reason(GPU) is None
    assert examined == [GPU]


def test_the_self_check_may_wait_where_the_caller_may_not(gpu: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = [2]
    gpu.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    gpu.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: modes.append("checked"))
    assert untrusted_reason(GPU) is None
    assert modes == [2, "default", "checked", 2]


def test_the_delta_rule_is_examined_when_it_is_asked_for(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: "the output is off" if delta else None)
    assert untrusted_reason(GPU) is None
    assert "the output is off" in str(untrusted_reason(GPU, delta=True))
    assert untrusted_reason(GPU) is None


def test_the_delta_rule_is_examined_alone(gpu: pytest.MonkeyPatch) -> None:
    """The other check compiles some twenty kernels that it does not run."""
    examined = []
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: examined.append(delta))
    for _ in range(2):
        assert untrusted_reason(GPU, delta=True) is None
    assert untrusted_reason(GPU) is None
    assert examined == [True]
    assert untrusted_reason(GPU, widths=USUAL) is None
    assert examined == [True, False]


def test_kernels_that_are_compiled_together_are_not_run(gpu: pytest.MonkeyPatch) -> None:
    """From whatever thread they are launched; one that cannot be compiled is an error when it is run."""
    launchers: list[Any] = []

    class Made:
        @property
        def run(self) -> None:
            launchers.append(self)

    class Kernel:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def warmup(self, *args: Any, **options: Any) -> Made:
            self.seen.append((args, options))
            self.compile(args[0])
            return Made()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: (self.compile(args[0]), self.seen.append(args))

        def compile(self, value: int) -> None:
            if value == 2:
                raise RuntimeError("ptxas died")

    gpu.setattr(launching, "_on_gpu", lambda: True)
    gpu.setattr(torch.cuda, "current_device", lambda: 0)
    gpu.setattr(launching, "_compiled", {})
    kernel = Kernel()
    with launching.compiled_together():
        thread = threading.Thread(target=lambda: launching.launch(kernel, (3,), 1, warps=4, BLOCK=8))
        thread.start()
        thread.join()
    assert kernel.seen == [((1,), {"BLOCK": 8, "num_warps": 4, "grid": (3,)})]
    assert len(launchers) == 1
    with launching.compiled_together():
        launching.launch(kernel, (3,), 2, warps=4)
    with pytest.raises(RuntimeError, match="ptxas died"):
        launching.launch(kernel, (3,), 2, warps=4)
    launching.launch(kernel, (3,), 4, warps=4)
    assert kernel.seen[-1] == (4,)


def test_heads_of_each_width_are_examined_by_themselves(gpu: pytest.MonkeyPatch) -> None:
    narrow = Widths(1, 64, 64)
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: "k is off" if widths == narrow else None)
    assert untrusted_reason(GPU, widths=USUAL) is None
    assert "on Some GPU for heads of 64 x 64, 1 to a state: k is off;" in str(untrusted_reason(GPU, widths=narrow))
    assert untrusted_reason(GPU, widths=USUAL) is None


def test_kernels_of_no_heads_are_trusted_after_any_check_that_was_passed(gpu: pytest.MonkeyPatch) -> None:
    """Another check compiles some twenty kernels that no model of these widths runs."""
    examined, wrong, right = [], Widths(1, 64, 64), Widths(3, 64, 64)

    def check(device: torch.device, delta: bool, widths: Widths) -> str | None:
        examined.append(widths)
        return "k is off" if widths == wrong else None

    gpu.setattr(selfcheck, "self_check", check)
    assert "k is off" in str(untrusted_reason(GPU, widths=wrong))
    assert untrusted_reason(GPU, widths=right) is None
    assert untrusted_reason(GPU) is None
    assert examined == [wrong, right]
    assert "k is off" in str(untrusted_reason(GPU, widths=wrong))


def test_a_check_that_failed_says_nothing_of_other_kernels(gpu: pytest.MonkeyPatch) -> None:
    narrow = Widths(1, 64, 64)
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: "k is off" if widths == narrow else None)
    assert "k is off" in str(untrusted_reason(GPU, widths=narrow))
    assert untrusted_reason(GPU) is None


def test_a_wrong_build_is_refused_with_versions_and_a_way_out(gpu: pytest.MonkeyPatch) -> None:
    wrong = "the output is off by 3.0e-01 of its size (bound 1e-02)"
    gpu.setattr(selfcheck, "self_check", lambda device, delta, widths: wrong)
    reason = str(untrusted_reason(GPU))
    assert reason.startswith(f"self-check failed on Some GPU: {wrong}; ")
    for part in ("compiled by triton ", " with ptxas ", "set TRITON_PTXAS_"):
        assert part in reason
    assert untrusted_reason(GPU) == reason


def test_an_old_gpu_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert untrusted_reason(GPU) == "Some GPU has compute capability 7.5, below 8.0"


def test_the_self_check_does_not_run_while_a_graph_is_captured(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "while a CUDA graph is being captured" in str(untrusted_reason(GPU))
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert untrusted_reason(GPU) is None


def test_amd_gpus_are_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "6.0")
    assert untrusted_reason(GPU) == "the kernels need an NVIDIA GPU, not an AMD one"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert untrusted_reason(GPU) == "triton is not installed"


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert untrusted_reason(CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert untrusted_reason(CPU) == "the kernels need an NVIDIA GPU, not cpu"


def test_a_device_of_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert untrusted_reason(GPU) == "there is no CUDA device"


@pytest.mark.parametrize("delta", [False, True])
def test_self_check_passes_the_kernels(delta: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(selfcheck, "OFFSETS", (0, 70, 70, 83))
    widths = USUAL if device == "cuda" else Widths(2, 16, 16)
    assert self_check(torch.device(device), delta=delta, widths=widths) is None
