"""`import sse_convert` is light, and registers converted models whichever import comes first."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.modeling.tiny import tiny_model

CONFIG, MODEL = "from transformers import AutoConfig", "from transformers import AutoModelForCausalLM"
ORDERS = {
    "package first": f"import sse_convert; {CONFIG}; {MODEL}",
    "auto classes first": f"{CONFIG}; {MODEL}; import sse_convert",
    "a source first": f"import sse_convert; from transformers import Gemma3TextConfig; {CONFIG}",
}


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = """
import sys, sse_convert
from sse_convert.modeling import architectures, auto, tensors
print(sorted({"torch", "transformers", "numpy"} & sys.modules.keys()), sse_convert.__version__)
"""
    assert run(code).strip().startswith("[] 0.")


LOADED = """
assert "transformers.models.olmo2" not in sys.modules
config = AutoConfig.from_pretrained(sys.argv[1])
print(type(config).__module__, type(config).__name__)
if "AutoModelForCausalLM" in globals():
    print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
    assert not [name for name in sys.modules if name.startswith("transformers.models.olmo2.modeling")]
"""
IN_FORKS = f"""
import os, sys, torch
for order in {list(ORDERS.values())}:
    if (child := os.fork()) == 0:
        exec(order + {LOADED!r})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
"""


@pytest.mark.slow
def test_registration_follows_the_import(tmp_path: Path) -> None:
    """In processes that have torch alone."""
    tiny_model("gemma3_text").save_pretrained(tmp_path)
    config = ["sse_convert.modeling.configuration", "SSEGemma3TextConfig"]
    model = [*config, "SSEGemma3ForCausalLM"]
    assert run(IN_FORKS, str(tmp_path)).split() == [*model, *model, *config]
