"""The code that travels inside a checkpoint: this package's modeling and kernel files, importing each other only.

They lie in one folder, flat: transformers looks for `from .name import ...` lines and for each file beside the one that
names it. They are written from the package, or copied from beside this file when it already runs from a checkpoint, so
that saving again works everywhere.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

CODE_FOLDER = "sse_code"
"""where the code lies in a checkpoint"""
CONFIGURATION_FILE = "configuration_sse"
MODELING_FILE = "modeling_sse"
LEFT_OUT = (
    "kernels.triton",
    "kernels.state_slots",
    "kernels.torch.step",
    "kernels.torch.reference",
    "modeling.context",
    "modeling.document_attention",
    "modeling.generation",
    "modeling.roomy_keys",
)
"""beginnings of modules that do not travel; one file stands for them all"""
STAND_IN = "modeling.left_out"
README = "README.md"
_README_BEGINS = """# Modeling code of a model with SSE layers

Written by sse-convert. `trust_remote_code=True` runs it with torch and transformers alone; it generates and trains.
With `import sse_convert` the package's own classes prevail, which compute the same and have Triton kernels.
Reading order: `modeling_hybrid.py`, `modeling_backbone.py`, `modeling_layer.py`, `kernels_dispatch.py`.

| file | what it does |
| --- | --- |"""
_PACKAGE = "sse_convert"
_PACKAGE_IMPORT = re.compile(rf"^(\s*)from {_PACKAGE}\.([\w.]+) import ", re.MULTILINE)
_FLAT_IMPORT = re.compile(r"^\s*from \.(\w+) import ", re.MULTILINE)
_ENTRY = '''"""Entry point of a checkpoint with SSE layers, written by sse-convert: the `SSE...{ending}` classes."""

from typing import TYPE_CHECKING

@ .{module} import __getattr__

if TYPE_CHECKING:  # names files that must travel with this one; `from` lines are what transformers looks for
    @ .{other} import __getattr__ as _other

__all__ = ["__getattr__"]
'''.replace("@", "from")  # a relative import in this file's own text would be taken for one of its own


def remote_code() -> dict[str, str]:
    """Path in a checkpoint to content of every file that it needs, and of their README; the same on every call."""
    files = _from_package() if __name__.startswith(f"{_PACKAGE}.") else _from_checkpoint()
    return {f"{CODE_FOLDER}/{name}": text for name, text in {**files, README: _readme(files)}.items()}


def write_remote_code(folder: Path) -> list[Path]:
    """Write the files of `remote_code` below `folder` (made if missing); files that are already right stay untouched.

    By hand, since the library's writer of files (`files.replacing`) does not travel.

    Returns:
        The paths of all files, sorted.
    """
    (folder / CODE_FOLDER).mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in sorted(remote_code().items()):
        path = folder / name
        paths.append(path)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    return paths


def _flat_name(module: str) -> str:
    return (STAND_IN if module.startswith(LEFT_OUT) else module).replace(".", "_")


def _readme(files: dict[str, str]) -> str:
    """What each file does, as its own first sentence says."""
    rows = [f"| `{name}` | {_first_sentence(text)} |" for name, text in sorted(files.items())]
    return "\n".join((_README_BEGINS, *rows, ""))


@cache
def _first_sentence(source: str) -> str:
    said = " ".join(str(ast.get_docstring(ast.parse(source))).split())
    return re.split(r"(?<=\w)[.:;] |\.$", said)[0]


@cache
def _from_package() -> dict[str, str]:
    """The closure of the model's imports, below the package's folder; read once."""
    root = Path(__file__).parent.parent
    files: dict[str, str] = {}
    pending = ["modeling.configuration", "modeling.hybrid"]
    while pending:
        module = pending.pop()
        module = STAND_IN if module.startswith(LEFT_OUT) else module
        name = f"{_flat_name(module)}.py"
        if name in files:
            continue
        source = (root / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        pending += [match[1] for match in _PACKAGE_IMPORT.findall(source)]
        files[name] = _PACKAGE_IMPORT.sub(lambda match: f"{match[1]}from .{_flat_name(match[2])} import ", source)
    for name, other, module, ending in (
        (CONFIGURATION_FILE, MODELING_FILE, "modeling.configuration", "Config"),
        (MODELING_FILE, CONFIGURATION_FILE, "modeling.hybrid", "ForCausalLM"),
    ):
        files[f"{name}.py"] = _ENTRY.format(ending=ending, module=_flat_name(module), other=other)
    return files


def _from_checkpoint() -> dict[str, str]:
    """The closure of the entry points' imports, in this file's folder."""
    folder = Path(__file__).parent
    files: dict[str, str] = {}
    pending = [CONFIGURATION_FILE, MODELING_FILE]
    while pending:
        name = f"{pending.pop()}.py"
        if name not in files:
            files[name] = (folder / name).read_text(encoding="utf-8")
            pending += _FLAT_IMPORT.findall(files[name])
    return files
