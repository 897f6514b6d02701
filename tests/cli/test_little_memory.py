"""Where memory is lacking, a command says so, with the code of the machine's limits, wherever it happens."""

import errno
import os
import subprocess
import sys

import pytest

from docs import warm
from sse_convert.cli import runner
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DependencyError, HardwareError, UsageError
from sse_convert.process_memory import lacks_memory, memory_for
from tests.training.conftest import make_llama, make_tokenizer

PROGRAM = """
import os, resource, sys
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
if "torch" in sys.modules:
    from transformers import LlamaForCausalLM
    import sse_convert.inference.generate
for size in {sizes}:
    if (child := os.fork()) == 0:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size * 2**20,) * 2)
        code = run_app(app, sys.argv[1:])
        sys.stderr.flush()
        os._exit(code)
    print(size, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of addresses are Linux's")
@pytest.mark.parametrize("imported", [False, True])
def test_few_addresses_are_left(tmp_path, imported):
    make_llama().save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    sizes = (10, 60) if imported else (10, 20, 100, 300)
    (tmp_path / "program.py").write_text(PROGRAM.format(sizes=sizes))
    command = ["program.py", "generate", "teacher", "the keeper"]
    out, error = tmp_path / "out.txt", tmp_path / "error.txt"
    if imported:
        assert warm.run(command, tmp_path, os.environ, out, error, timeout=100) == 0
    else:
        with out.open("w") as to, error.open("w") as beside:
            subprocess.run([sys.executable, *command], cwd=tmp_path, stdout=to, stderr=beside, check=True, timeout=100)
    assert out.read_text().splitlines() == [f"{size} 5" for size in sizes], error.read_text()
    assert error.read_text().count("error: the machine is out of memory") == len(sizes)


def made_of(cause, error):
    """An error that a library made of another one."""
    try:
        try:
            raise cause
        except BaseException:
            raise error  # noqa: B904 - as libraries do
    except Exception as found:
        return found


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("unable to mmap 96 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
        made_of(MemoryError(), CheckpointError("teacher: no such checkpoint")),
        made_of(
            ImportError("libgomp.so.1: failed to map segment from shared object"), DependencyError("not installed")
        ),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error):
    assert lacks_memory(error)
    with (
        pytest.raises(HardwareError, match="the machine is out of memory while loading teacher"),
        memory_for("writing all"),
        memory_for("loading teacher"),
    ):
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), UsageError("x")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)), memory_for("loading teacher"):
        raise error


@pytest.mark.parametrize("what", ["panic", "nothing is left"])
def test_a_command_without_any_memory_ends_with_its_code(monkeypatch, capfd, what):
    class PanicException(BaseException):
        """Of pyo3."""

    def fails(*_, **__):
        raise PanicException("ThreadPoolBuildError") if what == "panic" else MemoryError

    monkeypatch.setattr(runner, "_command" if what == "panic" else "_run_app", fails)
    monkeypatch.setattr(runner, "_invoked", lambda *_: "plan")
    assert run_app(app, ["plan", "x"]) == 5
    assert capfd.readouterr().err.startswith("error: the machine is out of memory")
