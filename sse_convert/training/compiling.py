"""torch.compile in a stage: decoder layers one by one, code that is kept, and a word about what is compiled late.

Layers of one kind share a program, which serves rows of any documents. A stage compiles in its first step or steps;
what it compiles is kept beside its checkpoints, where later stages and a run that goes on find it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sse_convert.compat import compiled_since, configure_compile, default_code_folder, has_cpp_compiler
from sse_convert.console import say
from sse_convert.errors import DependencyError
from sse_convert.training.monitors import Monitor, Progress
from sse_convert.training.setup import decoder_layers

COMPILED = "compiled"
"""folder of compiled code beside checkpoints"""
MOST_PROGRAMS = 32
"""programs that torch.compile may make of the decoder layer's forward"""
FIRST = 3
"""steps of a start in which everything should be compiled"""
_PLACES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""environment variable that says where compiled code is kept -> its part of our folder"""


@contextlib.contextmanager
def kept_code(folder: Path, *, tidy: bool) -> Iterator[None]:
    """Keep what is compiled in a folder, by versions and GPU, unless the environment says where; and remove it at the
    end, when nothing goes on from there.

    Args:
        folder: of a stage's work, or of a run.
        tidy: this process removes it.
    """
    place, usual = folder / COMPILED, default_code_folder()
    free = [name for name in _PLACES if os.environ.get(name, usual).startswith(usual)]
    before = {name: os.environ.pop(name) for name in free if name in os.environ}
    os.environ |= {name: str(place / _machine() / _PLACES[name]) for name in free}
    try:
        yield
    finally:
        for name in free:
            del os.environ[name]
        os.environ |= before
    if free and tidy:
        shutil.rmtree(place, ignore_errors=True)


def _machine() -> str:
    """What compiled code depends on, as a name."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"torch-{torch.__version__}-{gpu}".replace(" ", "-").replace("/", "-")


def compile_layers(model: PreTrainedModel) -> None:
    """torch.compile each decoder layer by itself, so that layers of one kind share a program; names stay as they are.

    The first layer that is trained gets inputs with gradients, as all after it have, or it would need a program of its
    own.

    Raises:
        DependencyError: on a CPU, there is no C++ compiler.
    """
    if not has_cpp_compiler():
        raise DependencyError(
            "train.compile needs a C++ compiler, and none is found",
            expected="g++ or clang++ on the PATH, or named by CXX",
            fix="install one, or set train.compile: false",
        )
    # layers of all kinds, of teacher and student, with and without masks and windows, are programs of one function
    configure_compile(MOST_PROGRAMS)
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile()
    trained = (layer for layer in layers if any(p.requires_grad for p in layer.parameters()))
    if (first := next(trained, None)) is not None:
        first.register_forward_pre_hook(_with_gradient)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_gradient(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and args[0].is_leaf:
        args[0].requires_grad_()


class LateCompiling(Monitor):
    """Says what is compiled after the first steps of a start, and why.

    Args:
        aloud: on the main process.
    """

    def __init__(self, *, aloud: bool) -> None:
        self._steps, self._since, self._aloud = 0, time.time(), aloud

    def say(self, now: Progress, record: dict[str, Any]) -> None:
        """Look at what the step compiled."""
        self._steps += 1
        found, self._since = compiled_since(self._since), time.time()
        if self._aloud and self._steps > FIRST and found:
            why = "; ".join(dict.fromkeys(" ".join(reason.split()) for _, reason in found))
            say(f"warning: step {now.step} compiled again, for {sum(spent for spent, _ in found):.0f} s: {why}")
