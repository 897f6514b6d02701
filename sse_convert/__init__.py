"""Turn pretrained Hugging Face Transformers into hybrids with Sparse State Expansion linear attention.

`import sse_convert` costs nothing heavy. It makes `AutoModelForCausalLM.from_pretrained` load converted checkpoints;
the Python API (`sse_convert.convert`, `sse_convert.evaluate`, ...) is imported on first use.
"""

import importlib
from typing import Any

from sse_convert.modeling.auto import register_on_import

__version__ = "0.1.0"
_API = (
    "align", "calibrate", "chat", "convert", "distill", "doctor", "evaluate", "export", "generate", "inspect", "plan",
    "push", "run", "uptrain", "verify",
)  # fmt: skip
__all__ = ["__version__", *_API]

register_on_import()


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module("sse_convert.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
