"""Turn pretrained Hugging Face Transformers into hybrids with Sparse State Expansion linear attention.

`import sse_convert` costs nothing heavy. It makes `AutoModelForCausalLM.from_pretrained` load converted checkpoints.
The commands are functions of `sse_convert.api`. `peft_targets(model)` names the modules that PEFT should adapt.
"""

from typing import TYPE_CHECKING, Any

from sse_convert.modeling.auto import register_on_import
from sse_convert.modeling.generation import surround_generation

__version__ = "0.2.0"
__all__ = ["__version__", "peft_targets"]

if TYPE_CHECKING:
    from sse_convert.training.lora import peft_targets

register_on_import()
surround_generation("sse_convert.inference.by_itself:graphed_by_itself")


def __getattr__(name: str) -> Any:
    """What imports torch is imported when it is asked for."""
    if name == "peft_targets":
        from sse_convert.training.lora import peft_targets

        return peft_targets
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
