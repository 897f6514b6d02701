"""Compile, without a GPU, every kernel that some calls would launch, and report what each uses of a multiprocessor.

`python -m tests.kernels.triton.compiling 90:train 100:decode ...` prints a JSON line for each architecture and case,
`... --tiles 90:train 89:decode ...` a line for each architecture, after it has compiled one launch for each choice of
tiles that none before makes, the one with most features. It is a process of its own, because the kernels of a test
process are interpreted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Hashable, Iterable
from functools import partial
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


def compile_in_subprocess(
    wanted: Iterable[tuple[int, str]], each_choice: Iterable[tuple[int, str]] = ()
) -> list[Report]:
    """The reports of capabilities and cases, and of the capabilities among `each_choice`, from one process."""
    plain, tiles = ([f"{capability}:{case}" for capability, case in group] for group in (wanted, each_choice))
    command = [sys.executable, "-m", __name__, *plain, *(["--tiles", *tiles] if tiles else [])]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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

    def compile(self, launch: Launch, limit: int | None = None) -> None:
        """Compile a launch's kernel, and report it among those that the case launched, with the shared memory it may
        ask for, by default the architecture's."""
        from sse_convert.kernels.triton.problem import Mapping, Shape

        kernel = self.run(launch.kernel, *launch.args, grid=launch.grid, warmup=True, **launch.options)
        if kernel.hash not in self.seen:
            constants = {name: value for name, value in launch.options.items() if name in launch.kernel.arg_names}
            for group in (x for x in launch.options.values() if isinstance(x, (Shape, Mapping))):
                constants |= group._asdict()
            self.seen[kernel.hash] = {"kernel": kernel.name, **usage(kernel), "constants": constants}
        self.launched[kernel.hash] = {"limit": limit or SHARED_LIMIT[self.capability], **self.seen[kernel.hash]}

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

    def report_each_choice(self, wanted: dict[int, list[str]]) -> list[Report]:
        """Run cases for several architectures, and compile each choice of tiles where it comes first, to fit where
        shared memory is least of those that do."""
        from tests.kernels.triton.compile_cases import COMPILE_CASES

        launches: dict[int, list[Launch]] = {}
        for self.capability, cases in wanted.items():
            self.take = launches.setdefault(self.capability, []).append
            for case in cases:
                COMPILE_CASES[case].call()
        self.take = self.compile
        found, reports = self._least_shared(launches), []
        for capability in wanted:
            chosen = [x for x in richest(launches[capability]) if self._choice(capability, x) in found]
            limits = [found.pop(self._choice(capability, x)) for x in chosen]
            reports.append(self._report(capability, "each choice of tiles", partial(self._compile_all, chosen, limits)))
        return reports

    @staticmethod
    def _choice(capability: int, launch: Launch) -> Hashable:
        """Products in tensor memory are other instructions."""
        return launch.tiles, capability in TENSOR_MEMORY

    def _least_shared(self, launches: dict[int, list[Launch]]) -> dict[Hashable, int]:
        """Bytes of shared memory that each choice of tiles may ask for."""
        found: dict[Hashable, int] = {}
        for capability, made in launches.items():
            for choice in (self._choice(capability, launch) for launch in made):
                found[choice] = min(found.get(choice, SHARED_LIMIT[capability]), SHARED_LIMIT[capability])
        return found

    def _compile_all(self, launches: list[Launch], limits: list[int]) -> None:
        for launch, limit in zip(launches, limits, strict=True):
            self.compile(launch, limit)

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

    def pair(text: str) -> tuple[int, str]:
        capability, _, case = text.partition(":")
        return int(capability), case

    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", type=pair)
    parser.add_argument("--tiles", nargs="+", type=pair, default=[])
    given = parser.parse_args()
    compiler = Compiler()
    tiles: dict[int, list[str]] = {}
    for capability, case in given.tiles:
        tiles.setdefault(capability, []).append(case)
    for report in (*(compiler.report(*case) for case in given.cases), *compiler.report_each_choice(tiles)):
        print(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
