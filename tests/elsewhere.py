"""Processes that cannot import sse_convert, as where a checkpoint travels to."""

import os
from pathlib import Path

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
