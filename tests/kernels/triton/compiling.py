"""Compile, without a GPU, every kernel that some calls would launch, and report what each uses of a multiprocessor.

`python -m tests.kernels.triton.compiling 90 CASE...` prints one JSON line per compiled kernel. It is a process of its
own, because the kernels of a test process are interpreted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""bytes of shared memory a block may ask for, by compute capability"""


def compile_in_subprocess(capability: int, cases: list[str]) -> list[dict[str, Any]]:
    """What each kernel of the cases uses: kernel, registers, stack, local, shared (bytes), warps, constants."""
    command = [sys.executable, "-m", __name__, str(capability), *cases]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def collect(capability: int, calls: list[Callable[[], None]]) -> list[dict[str, Any]]:
    """Run the calls with every launch replaced by a compilation."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    found: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in found:
            constants = {name: value for name, value in options.items() if name in self.arg_names}
            found[kernel.hash] = {"kernel": kernel.name, "constants": constants, **usage(kernel)}
        return kernel

    JITFunction.run = compile_only
    try:
        for call in calls:
            call()
    finally:
        JITFunction.run = run
    return list(found.values())


def usage(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack, local and shared memory, and warps."""
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
    return {"registers": registers, "stack": stack, "local": local, "shared": shared, "warps": warps}


def main() -> None:
    """Entry point of the subprocess."""
    from tests.kernels.triton.compile_cases import COMPILE_CASES

    for line in collect(int(sys.argv[1]), [COMPILE_CASES[name].call for name in sys.argv[2:]]):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
