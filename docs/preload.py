"""What a warm process begins with: what nearly every command imports, and what transformers does once for a model.

Nothing of the package is among it, so that its own imports are those of a fresh process.
"""

import gc
import importlib

gc.disable()  # all that imports make stays
for name in (
    "torch.nn.attention.varlen",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "accelerate",
    "pydantic.types",
    "typer.main",
    "rich.console",
):
    importlib.import_module(name)
# compiles the rules for the names of all families' tensors
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.freeze()
gc.enable()
