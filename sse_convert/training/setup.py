"""Everything a stage needs before its first step: the accelerator, the two models, what is trained and how fast.

The student is loaded in float32 and trained there (master weights); matrix products run in the recipe's mixed
precision, which frozen matrices have themselves (`frozen_matrices.py`). The teacher is frozen, in bfloat16 on a GPU and
float32 on a CPU.
"""

import datetime as dt
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, DynamoBackend, GradientAccumulationPlugin
from torch import nn
from transformers import PreTrainedModel

from sse_convert.checkpoints.load_model import pick_device
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.weights import require_finite
from sse_convert.console import progress
from sse_convert.errors import HardwareError, TrainingError, UsageError
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.loading import refuse
from sse_convert.recipe.schema import Stage, Train
from sse_convert.surgery.positions import stretch
from sse_convert.training.lora import add_lora, lora_targets
from sse_convert.training.sharding import empty_model, is_sharded, read_once

WAIT = dt.timedelta(hours=12)
"""how long processes wait for one that converts, samples, evaluates or saves alone"""
_OFFERED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def make_accelerator(train: Train) -> Accelerator:
    """The accelerator of a stage. The recipe decides on precision and accumulation, the launcher on processes.

    Args:
        train: precision.

    Raises:
        HardwareError: a parallel mode or a precision that is not offered.
        TrainingError: another accelerator with another precision is in use in this process.
        UsageError: under FSDP, a setting of Accelerate's that does not count there.
    """
    _refuse_environment()
    # `sharding.py` sees to it that one process reads a model; transformers and Accelerate do that for some models alone
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        accelerator = Accelerator(
            cpu=not _on_gpu(),  # said outright, or two launched CPU processes would not know of each other
            mixed_precision=_precision(train),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=WAIT),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
    except ValueError as error:
        raise TrainingError(str(error), expected="one precision in a process", fix="start a new process") from error
    if accelerator.distributed_type not in _OFFERED:
        raise HardwareError(
            f"Accelerate is configured for {accelerator.distributed_type.value}",
            expected="one process, data parallelism (MULTI_GPU, MULTI_CPU) or FSDP version 2",
            fix="run `accelerate config` again, or launch without a configuration file",
        )
    if is_sharded(accelerator):
        _configure_fsdp(accelerator)
    return accelerator


def _precision(train: Train) -> str:
    return train.mixed_precision or ("bf16" if _on_gpu() else "no")


def autocast_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """In which matrix products run; None for the weights' own."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else None


def _on_gpu() -> bool:
    return pick_device().type != "cpu" and not _set("ACCELERATE_USE_CPU")


def _set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true")


def _refuse_environment() -> None:
    """Refuse what `accelerate launch` asks for in the environment and SSE models cannot do.

    Raises:
        HardwareError: tensor, context or sequence parallelism, DeepSpeed or Megatron.
    """
    for mode in ("tp", "cp", "sp"):
        name = f"PARALLELISM_CONFIG_{mode.upper()}_SIZE"
        if _set("ACCELERATE_USE_PARALLELISM_CONFIG") and int(os.environ.get(name, "1")) > 1:
            raise refuse(mode, f"{name}={os.environ[name]}")
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if _set(f"ACCELERATE_USE_{engine}"):
            raise HardwareError(
                f"Accelerate is configured for {engine.lower()}",
                expected="data parallelism or FSDP version 2",
                fix="run `accelerate config` again; `--use_fsdp --fsdp_version 2` shards a model over GPUs",
            )


def _configure_fsdp(accelerator: Accelerator) -> None:
    """Let the recipe decide what it decides without FSDP, and refuse what `sharding.py` does not heed.

    Raises:
        HardwareError: FSDP version 1.
        UsageError: Accelerate is told to compile the model, or to leave modules unsharded.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise HardwareError(
            f"FSDP version {plugin.fsdp_version}", expected="version 2", fix="launch with --fsdp_version 2"
        )
    if (backend := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        raise UsageError(
            f"Accelerate is configured for dynamo_backend {backend.value.lower()} under FSDP",
            expected="no: train.compile in the recipe decides, and compiles each decoder layer by itself",
            fix="launch with --dynamo_backend no, and set train.compile: true",
        )
    if plugin.ignored_modules:
        raise UsageError(
            f"Accelerate is configured for fsdp_ignored_modules {plugin.ignored_modules!r}",
            expected="none: all weights of a model are sharded",
            fix="remove it from Accelerate's configuration file, and FSDP_IGNORED_MODULES from the environment",
        )
    plugin.activation_checkpointing = False  # the recipe's gradient_checkpointing decides
    dtype = autocast_dtype(accelerator)
    # gradients are summed in float32, and nothing is cast between layers: the embedding's output has their dtype. Casts
    # at a layer's edge would be missing where a gradient checkpoint repeats it (pytorch#159359)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)


def load_student(files: CheckpointFiles, sse: dict[str, Any], accelerator: Accelerator) -> PreTrainedModel:
    """The converted model in float32 on the CPU, in training mode. Under FSDP the first process alone has its weights.

    Args:
        files: the opened checkpoint, in a folder.
        sse: layers and mixers, as `match_recipe` gives them.
        accelerator: of the stage.

    Raises:
        CheckpointError: the folder holds no checkpoint, or weights that are not finite.
    """
    return _read(files, torch.float32, accelerator, sse=sse).train()


def _read(
    files: CheckpointFiles,
    dtype: torch.dtype,
    accelerator: Accelerator,
    *,
    device: torch.device | None = None,
    sse: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A model whose weights are finite, read once where they are shared out."""

    def read() -> PreTrainedModel:
        with progress(f"loading {Path(files.name).name}", 1):
            model = load_pretrained(files.folder, dtype=dtype, device=device, sse=sse)
            require_finite(model, files.name)
        return model

    return read_once(read, lambda: empty_model(files.folder, dtype, sse), accelerator)


def stretch_rope(model: PreTrainedModel, stage: Stage) -> None:
    """Write a stage's `rope` into the configuration, and make the rotary embedding anew if that changed it.

    Raises:
        RecipeError: the model has no rotary embedding.
    """
    if stretch(model.config, stage):
        backbone = backbone_of(model)
        backbone.rotary_emb = type(backbone.rotary_emb)(config=decoder_config(model.config))


def load_teacher(files: CheckpointFiles, accelerator: Accelerator) -> PreTrainedModel:
    """The teacher, frozen, on this process's device; under FSDP, which shards it, on the first process's CPU.

    Args:
        files: the teacher's, all of them on this machine.
        accelerator: of the stage.

    Raises:
        CheckpointError: it cannot be loaded, or has weights that are not finite.
    """
    low = accelerator.device.type != "cpu" and accelerator.mixed_precision != "no"
    device = None if is_sharded(accelerator) else accelerator.device
    return _read(files, torch.bfloat16 if low else torch.float32, accelerator, device=device).requires_grad_(False)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a converted or plain model of a known family."""
    layers = model.get_submodule(source_spec(model.config.model_type).layers_path)
    assert isinstance(layers, nn.ModuleList)
    return layers


def converted_attention(model: PreTrainedModel) -> dict[int, str]:
    """Index of each converted layer (SSE, GLA or sliding) -> path of its attention module."""
    spec = source_spec(model.config.model_type)
    if not hasattr(model.config, "sse"):
        return {}
    return {i: spec.attention_path(i) for i, mixer in enumerate(layer_mixers(model.config)) if mixer is not None}


def recompute_activations(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing, under the name this version of transformers has for it."""
    newer = "activation_checkpointing_enable"
    enable = getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False})  # the balance loss needs the graph of the first forward


def prepare_parameters(model: PreTrainedModel, stage: Stage, train: Train) -> None:
    """Freeze what the stage does not train, and add LoRA where it asks for that. What a family itself never trains by
    gradients (Ernie's routing biases) stays frozen, and so does what sees images: rows are text.

    Raises:
        TrainingError: LoRA targets match nothing.
    """
    attention = tuple(f"{path}." for path in converted_attention(model).values())
    spec = source_spec(model.config.model_type)
    never = {name for name, p in model.named_parameters() if not p.requires_grad or spec.sees_images(name)}
    if stage.train == "lora":
        targets = lora_targets(model, set(converted_attention(model).values()))
        add_lora(model, train.lora_rank, targets, train.seed)
    for name, parameter in model.named_parameters():
        adapter = ".lora_" in name
        trained = adapter or name.startswith(attention) or stage.train == "all"
        parameter.requires_grad_(trained and name not in never)
