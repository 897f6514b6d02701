"""Turn pretrained Hugging Face Transformers into hybrids with Sparse State Expansion linear attention.

`import sse_convert` costs nothing heavy. It makes `AutoModelForCausalLM.from_pretrained` load converted checkpoints.
For models in memory there are `convert_model`, `calibrate` and `kl_loss`; commands are functions of `sse_convert.api`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sse_convert.modeling.auto import register_on_import
from sse_convert.modeling.generation import surround_generation

__version__ = "0.2.0"
__all__ = [
    "SSEAttention",
    "__version__",
    "calibrate",
    "convert_model",
    "kl_loss",
    "peft_targets",
    "sse_attention",
]

if TYPE_CHECKING:
    from sse_convert.calibration.calibrate_model import calibrate_model as calibrate
    from sse_convert.kernels.dispatch import sse_attention
    from sse_convert.modeling.layer import SSEAttention
    from sse_convert.surgery.convert_model import convert_model
    from sse_convert.training.kl_loss import kl_loss
    from sse_convert.training.lora import peft_targets

_HOMES = {
    "SSEAttention": "modeling.layer",
    "calibrate_model": "calibration.calibrate_model",
    "convert_model": "surgery.convert_model",
    "kl_loss": "training.kl_loss",
    "peft_targets": "training.lora",
    "sse_attention": "kernels.dispatch",
}
"""public name -> the module that has it"""

register_on_import()
surround_generation("sse_convert.inference.by_itself:graphed_by_itself")


def __getattr__(name: str) -> Any:
    """What imports torch is imported when it is asked for."""
    own = "calibrate_model" if name == "calibrate" else name
    if name in __all__ and own in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[own]}"), own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
