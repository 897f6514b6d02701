"""What a warm process begins with: what nearly every command imports, and what transformers does once for a model.

Nothing of the package is among it, so that its own imports are those of a fresh process.
"""

import gc
import importlib

gc.disable()  # all that imports make stays
for name in (
    "torch",
    "transformers.modeling_utils",
    "transformers.generation",
    "datasets",
    "accelerate",
    "typer",
    "rich",
):
    importlib.import_module(name)
# compiles the rules for the names of all families' tensors
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.freeze()
gc.enable()
