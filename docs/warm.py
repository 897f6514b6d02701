"""Python processes that begin with the heavy libraries imported: forked from one server (docs/preload.py imports them).

Each is a process of its own, with its own folder, environment, arguments and exit code; only the imports are shared.
"""

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
}
"""environment that libraries read when they are imported, so the same for all"""


def run(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    out: Path,
    error: Path,
    *,
    timeout: float,
    hub: Mapping[str, str] | None = None,
) -> int:
    """Run `python ARGUMENTS` (`-m module ...` or `script.py ...`) and return its exit code.

    Args:
        arguments: what follows `python`.
        folder: working folder.
        environment: all of it, beside `FIXED`.
        out: file that stdout is appended to.
        error: file that stderr is appended to, maybe the same.
        timeout: seconds after which the process is killed.
        hub: environment of the hub's library, beside and over `FIXED`.

    Raises:
        TimeoutError: it ran longer.
    """
    context = multiprocessing.get_context("forkserver")
    with _environment({**environment, **FIXED, "HF_MODULES_CACHE": _modules().name}):
        context.set_forkserver_preload(["docs.preload"])
        forkserver.ensure_running()
    whole = {**environment, **FIXED, **(hub or {})}
    process = context.Process(target=_main, args=(list(arguments), folder, whole, out, error))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"not finished after {timeout:.0f} s: python {' '.join(arguments)}")
    return process.exitcode


@cache
def _modules() -> "tempfile.TemporaryDirectory[str]":
    """Where transformers keeps the code of checkpoints, for all processes of the server: compiled once, as at home."""
    return tempfile.TemporaryDirectory(prefix="hf-modules-")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables while the server starts."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(arguments: list[str], folder: Path, environment: Mapping[str, str], out: Path, error: Path) -> None:
    """In the new process: become `python ARGUMENTS`."""
    for path, descriptor in ((out, 1), (error, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    constants = importlib.reload(importlib.import_module("huggingface_hub.constants"))  # of this environment
    importlib.import_module("huggingface_hub.hf_api").api.endpoint = constants.ENDPOINT
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str((folder / arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
