"""Processes of their own: without sse_convert, as where a checkpoint travels to, and with a hub of their own."""

import os
from pathlib import Path
from typing import NamedTuple

from docs import warm

BLOCKED = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sse_convert":
            raise ModuleNotFoundError("sse_convert is hidden from this test")
sys.meta_path.insert(0, Blocker())
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads(1)
"""


def without_package(script: str, folder: Path, *arguments: str) -> None:
    """Run a script in a folder, in a process of its own that cannot import sse_convert; it must succeed."""
    (folder / "script.py").write_text(BLOCKED + script)
    said = folder / "said.txt"
    code = warm.run(["script.py", *arguments], folder, os.environ, said, said, timeout=300)
    assert code == 0, said.read_text()[-3000:]


class Done(NamedTuple):
    """What became of a process."""

    code: int
    out: str
    error: str


def beside_hub(arguments: list[object], folder: Path, endpoint: str, **environment: str) -> Done:
    """Run `python ARGUMENTS` in a process of its own whose hub is at `endpoint`; `HF_HOME` is in the folder, unless the
    environment says otherwise, and no token of this machine is known."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE_"))}
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    out, error = folder / "out.txt", folder / "error.txt"
    for path in (out, error):
        path.write_text("")
    given = [str(argument) for argument in arguments]
    code = warm.run(given, folder, outside, out, error, timeout=300, hub={**hub, **environment})
    return Done(code, out.read_text(), error.read_text())
