"""Compile, without a GPU, every kernel that some calls would launch, and report what each uses of a multiprocessor.

`python -m tests.kernels.triton.compiling 90:train 100:decode ...` prints a JSON line for each architecture and case. It
is a process of its own, because the kernels of a test process are interpreted.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

SHARED_LIMIT = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
}
"""bytes of shared memory a block may ask for, by compute capability"""
TENSOR_MEMORY = (100, 103)
"""whose products add up in tensor memory"""

Report = dict[str, Any]
"""capability, case, and either error or kernels: name, registers, stack, local and shared bytes, warps, constants"""


@functools.cache
def compile_in_subprocess(capability: int, *cases: str) -> dict[str, Report]:
    """The report of each case."""
    return {case: report for (_, case), report in compile_all(*((capability, case) for case in cases)).items()}


@functools.cache
def compile_all(*wanted: tuple[int, str]) -> dict[tuple[int, str], Report]:
    """The report of each capability and case, from one process."""
    names = [f"{capability}:{case}" for capability, case in wanted]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {(report["capability"], report["case"]): report for report in reports}


class Compiler:
    """Replaces launches by compilation for one architecture after another, and keeps what they compiled."""

    def __init__(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        from sse_convert.kernels.triton import problem
        from sse_convert.kernels.triton.problem import Mapping, Shape

        self.capability = 0
        problem.shared_memory = lambda device: SHARED_LIMIT[self.capability]
        problem.tensor_memory = lambda device: self.capability in TENSOR_MEMORY
        self.seen: dict[str, Report] = {}
        self.launched: dict[str, Report] = {}
        triton.runtime.driver.set_active(self)
        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            if kernel.hash not in self.seen:
                constants = {name: value for name, value in options.items() if name in function.arg_names}
                for group in (x for x in options.values() if isinstance(x, (Shape, Mapping))):
                    constants |= group._asdict()
                self.seen[kernel.hash] = {"kernel": kernel.name, **usage(kernel), "constants": constants}
            self.launched[kernel.hash] = self.seen[kernel.hash]
            return kernel

        JITFunction.run = compile_only

    def get_current_target(self) -> Any:
        """Called by triton, as are the next two."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Each architecture is a device, for which triton compiles anew."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def report(self, capability: int, case: str) -> Report:
        """Run one case for one architecture."""
        from tests.kernels.triton.compile_cases import COMPILE_CASES

        self.capability, self.launched = capability, {}
        about = {"capability": capability, "case": case}
        try:
            COMPILE_CASES[case].call()
        except Exception:
            return {**about, "error": traceback.format_exc()}
        return {**about, "kernels": list(self.launched.values())}


def usage(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack, local and shared memory, warps; waits for loads in flight, and the most
    buffers that a loop loads into."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        printed = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    assert numbers is not None, printed
    registers, stack, local = map(int, numbers.groups())
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    text = kernel.asm["ttgir"]
    buffers = [int(n) for n in re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", text)]
    return {
        "registers": registers, "stack": stack, "local": local, "shared": shared, "warps": warps,
        "waits": text.count("ttg.async_wait"), "buffers": max(buffers, default=0),
    }  # fmt: skip


def main() -> None:
    """Entry point of the subprocess."""
    compiler = Compiler()
    for wanted in sys.argv[1:]:
        capability, _, case = wanted.partition(":")
        print(json.dumps(compiler.report(int(capability), case), default=str), flush=True)


if __name__ == "__main__":
    main()
