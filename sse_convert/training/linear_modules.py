"""Modules that multiply by a matrix of the teacher's."""

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)
"""their classes; a class derived from them does more, as routers of experts do"""


def peft_targets(model: PreTrainedModel) -> list[str]:
    """Endings of the module names that an adapter should stand beside: the teacher's own matrices of every layer.

    `target_modules` of PEFT's configurations takes them as they are. Left out is what conversion added: routers choose
    partitions and decays say what is forgotten, and a low-rank change moves both for all tokens at once. They are
    small, so train them whole (`modules_to_save`) or not at all. The language-model head is left out too.

    Args:
        model: converted, or its teacher; from `AutoModelForCausalLM`, with or without this package.

    Returns:
        Sorted names such as `down_proj` and `q_proj`.
    """
    linear = [name for name, module in model.base_model.named_modules() if type(module) in LINEAR]
    return sorted({name.rpartition(".")[2] for name in linear if ".sse_" not in f".{name}"})
