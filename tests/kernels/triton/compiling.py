"""Compile, without a GPU, every kernel that some calls would launch, and report what each uses of a multiprocessor.

`python -m tests.kernels.triton.compiling 90:train 100:decode ...` prints a JSON line for each architecture and case,
`... --tiles 89:train 89:decode ...` compiles one launch for each choice of tiles that they make, the one with most
features. It is a process of its own, because the kernels of a test process are interpreted.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
    return {(report["capability"], report["case"]): report for report in _reports(wanted)}


def compile_each_choice(capability: int, *cases: str) -> Report:
    """One report of what some cases compile where every choice of tiles is compiled once."""
    (report,) = _reports([(capability, case) for case in cases], "--tiles")
    return report


def _reports(wanted: Iterable[tuple[int, str]], *options: str) -> list[Report]:
    """What a process prints of these capabilities and cases."""
    names = [f"{capability}:{case}" for capability, case in wanted]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *options, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class Launch(NamedTuple):
    """A launch that a case makes."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def tiles(self) -> Hashable:
        """Equal for launches whose kernel, sizes, warps, registers and kind of products are the same; what else is
        compiled in are features: flags, optional tensors, and settings of the call, `Shape` and `Mapping`."""
        sizes = [(name, value) for name, value in self.options.items() if type(value) is int]
        return self.kernel.__name__, tuple(sorted(sizes)), getattr(self.options.get("shape"), "IEEE", None)

    @property
    def features(self) -> int:
        """How many it has."""
        settings = [x for x in self.options.values() if isinstance(x, tuple)]
        values = (*self.args, *self.options.values(), *(x for group in settings for x in group))
        return sum(x is not None and x is not False for x in _flat(values))


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    """Values, and those in tuples of them."""
    for value in values:
        yield from _flat(value) if isinstance(value, tuple) else (value,)


def richest(launches: Iterable[Launch]) -> list[Launch]:
    """For each choice of tiles the launch with most features, the first of equals."""
    found: dict[Hashable, Launch] = {}
    for launch in launches:
        found[launch.tiles] = max(found.get(launch.tiles, launch), launch, key=lambda x: x.features)
    return list(found.values())


class Compiler:
    """Replaces launches by compilation for one architecture after another, and keeps what they compiled."""

    def __init__(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        from sse_convert.kernels.triton import problem

        self.capability = 0
        problem.shared_memory = lambda device: SHARED_LIMIT[self.capability]
        problem.tensor_memory = lambda device: self.capability in TENSOR_MEMORY
        self.seen: dict[str, Report] = {}
        self.launched: dict[str, Report] = {}
        self.take = self.compile
        triton.runtime.driver.set_active(self)
        self.run = JITFunction.run

        def taken(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.take(Launch(function, grid, args, options))

        JITFunction.run = taken

    def compile(self, launch: Launch) -> None:
        """Compile a launch's kernel, and report it among those that the case launched."""
        from sse_convert.kernels.triton.problem import Mapping, Shape

        kernel = self.run(launch.kernel, *launch.args, grid=launch.grid, warmup=True, **launch.options)
        if kernel.hash not in self.seen:
            constants = {name: value for name, value in launch.options.items() if name in launch.kernel.arg_names}
            for group in (x for x in launch.options.values() if isinstance(x, (Shape, Mapping))):
                constants |= group._asdict()
            self.seen[kernel.hash] = {"kernel": kernel.name, **usage(kernel), "constants": constants}
        self.launched[kernel.hash] = self.seen[kernel.hash]

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

        return self._report(capability, case, COMPILE_CASES[case].call)

    def report_each_choice(self, capability: int, *cases: str) -> Report:
        """Run cases for one architecture, and compile of all their launches one for each choice of tiles."""
        from tests.kernels.triton.compile_cases import COMPILE_CASES

        def call() -> None:
            launches: list[Launch] = []
            self.take = launches.append
            for case in cases:
                COMPILE_CASES[case].call()
            for launch in richest(launches):
                self.compile(launch)

        return self._report(capability, "each choice of tiles", call)

    def _report(self, capability: int, case: str, call: Callable[[], object]) -> Report:
        self.capability, self.launched = capability, {}
        about = {"capability": capability, "case": case}
        try:
            call()
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
    each_choice = sys.argv[1] == "--tiles"
    wanted = [(int(capability), case) for capability, case in (x.split(":", 1) for x in sys.argv[1 + each_choice :])]
    if each_choice:
        print(json.dumps(compiler.report_each_choice(wanted[0][0], *(case for _, case in wanted)), default=str))
        return
    for capability, case in wanted:
        print(json.dumps(compiler.report(capability, case), default=str), flush=True)


if __name__ == "__main__":
    main()
