"""Turn pretrained Hugging Face Transformers into hybrids with Sparse State Expansion linear attention.

`import sse_convert` costs nothing heavy. It makes `AutoModelForCausalLM.from_pretrained` load converted checkpoints.
The commands are functions of `sse_convert.api`.
"""

from sse_convert.modeling.auto import register_on_import

__version__ = "0.2.0"
__all__ = ["__version__"]

register_on_import()
