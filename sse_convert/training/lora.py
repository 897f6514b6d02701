"""PEFT LoRA beside the teacher's frozen weights, for stages with `train: lora`; merged when the stage ends."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sse_convert.modeling.architectures import backbone_of, source_spec

LINEAR = (nn.Linear, Conv1D)
"""classes of the modules that multiply by a matrix; a class derived from them does more, as routers of experts do"""
BASE = ".base_layer."
"""in the names of parameters beside which an adapter stands"""
ALPHA = 2
"""as a multiple of the rank"""
_DOWN = ".lora_A.default.weight"
_UP = ".lora_B.default.weight"


def lora_targets(model: PreTrainedModel, converted: set[str]) -> list[str]:
    """Names of the linear modules that get an adapter: inside decoder layers, outside the converted attention.

    Args:
        model: the student.
        converted: paths of the converted layers' attention.
    """
    return [
        name
        for name, module in backbone_of(model).named_modules(prefix=source_spec(model.config.model_type).backbone)
        if type(module) in LINEAR and not any(name.startswith(f"{path}.") for path in converted)
    ]


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


def add_lora(model: PreTrainedModel, rank: int, targets: list[str], seed: int) -> None:
    """Put trainable adapters beside the target modules; everything else is frozen. The model's output is unchanged.

    Args:
        model: the student, on the CPU.
        rank: of the adapters.
        targets: from `lora_targets`.
        seed: of the adapters' weights, the same on every process: shards of different matrices would not fit together.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=ALPHA * rank, target_modules=targets)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@torch.no_grad()
def merge_lora(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A full state dict with adapters, as one without: W + alpha / rank * up @ down.

    Works on the gathered state and not on the model, because a sharded model has no whole weights to merge.

    Args:
        state: from the model with adapters.
        model: that model; says which modules store their weight transposed, and the scaling.
    """
    merged = {key.replace(BASE, "."): value for key, value in state.items() if ".lora_" not in key}
    for key in (key for key in state if key.endswith(_DOWN)):
        name = key.removesuffix(_DOWN)
        module: Any = model.get_submodule(name)
        delta = module.scaling["default"] * (state[name + _UP].float() @ state[key].float())
        weight = merged[f"{name}.weight"].float()
        merged[f"{name}.weight"] = weight + (delta.t() if module.fan_in_fan_out else delta).to(weight)
    return merged
