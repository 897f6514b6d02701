"""What vLLM is told about a converted model before it builds anything, and what is refused then."""

import dataclasses as dc
import math
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from sse_convert.errors import UsageError
from sse_convert.mixers import BY_LAYER, Mixer, SSEMixer
from sse_convert.modeling.arch_spec import DELTA
from sse_convert.modeling.attention_dims import LINEAR, AttentionDims, attention_dims
from sse_convert.modeling.configuration import layer_mixers, spec_of
from sse_convert.serving.head_slices import local_dims
from sse_convert.serving.layer_state import state_shapes

SERVED = {
    "llama": "llama:LlamaForCausalLM",
    "mistral": "mistral:MistralForCausalLM",
    "qwen2": "qwen2:Qwen2ForCausalLM",
    "qwen2_moe": "qwen2_moe:Qwen2MoeForCausalLM",
    "qwen3": "qwen3:Qwen3ForCausalLM",
    "qwen3_moe": "qwen3_moe:Qwen3MoeForCausalLM",
    "gemma": "gemma:GemmaForCausalLM",
    "gemma2": "gemma2:Gemma2ForCausalLM",
    "gemma3_text": "gemma3:Gemma3ForCausalLM",
}
"""model_type of the source -> vLLM's module and class"""
STATE_TYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""`--mamba-ssm-cache-dtype` -> type of the states"""
ALIGNMENT = 256
"""bytes; each tensor of a row begins at a multiple"""
BLOCK_SCHEDULER = "sse_convert.serving.vllm.scheduler.BlockScheduler"
SOURCE_LAYER_TYPES = "sse_source_layer_types"
"""where the configuration keeps the `layer_types` that vLLM's own classes build their layers by"""


class ServedConfig(VerifyAndUpdateConfig):
    """What vLLM asks about every model of an architecture, answered for converted ones."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Name the converted layers `linear_attention`, by which vLLM knows that there are states.

        Raises:
            UsageError: the family or a layer is of a kind that is not served.
        """
        config = model_config.hf_config
        check_model(config)
        if hasattr(config, SOURCE_LAYER_TYPES):
            return
        setattr(config, SOURCE_LAYER_TYPES, getattr(config, "layer_types", None))
        kinds = getattr(config, SOURCE_LAYER_TYPES) or ["full_attention"] * config.num_hidden_layers
        mixers = layer_mixers(config)
        config.layer_types = [kind if mixer is None else LINEAR for kind, mixer in zip(kinds, mixers, strict=True)]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what is not built, and on CPUs have chunks end where states are kept (see `BlockScheduler`).

        Raises:
            UsageError: an option asks for it.
        """
        parallel, cache, scheduler = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.scheduler_config
        aligned = cache.enable_prefix_caching and current_platform.is_cpu()
        if aligned and scheduler.scheduler_cls is None:
            scheduler.scheduler_cls, scheduler.async_scheduling = BLOCK_SCHEDULER, False
        refused = {
            "speculative decoding": vllm_config.speculative_config is not None,
            "LoRA adapters on a CPU with vLLM 0.32": vllm_config.lora_config is not None and adapts_unasked(),
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "context parallelism": parallel.decode_context_parallel_size > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "micro-batches (dbo)": getattr(parallel, "enable_dbo", False),
            "transfer of states between servers": vllm_config.kv_transfer_config is not None,
            f"mamba_cache_mode {cache.mamba_cache_mode!r}": cache.mamba_cache_mode not in ("none", "align"),
            "prefix caching on a CPU with this vLLM": aligned and not splits_chunks(),
            "a scheduler class with prefix caching on a CPU": aligned and scheduler.scheduler_cls != BLOCK_SCHEDULER,
            f"states in {cache.mamba_ssm_cache_dtype}": cache.mamba_ssm_cache_dtype not in STATE_TYPES,
        }
        if asked := [name for name, wanted in refused.items() if wanted]:
            raise UsageError(
                f"{', '.join(asked)} with a converted model",
                expected="an engine without it: sse-convert's plugin has not built it",
                fix="leave the option out",
            )


def splits_chunks() -> bool:
    """Whether vLLM's scheduler cuts prompts by the method that `BlockScheduler` overrides."""
    try:
        from sse_convert.serving.vllm.scheduler import overrides
    except ImportError:
        return False
    return overrides()


def adapts_unasked() -> bool:
    """Whether requests without an adapter get another's on this platform, as by vLLM 0.32's kernels for CPUs."""
    if not current_platform.is_cpu():
        return False
    from vllm.lora.ops.torch_ops import bgmv_expand

    output, none = torch.zeros(1, 1), torch.tensor([-1])
    bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), output, none)
    return bool(output.any())


def check_model(config: Any) -> None:
    """Refuse what cannot be served.

    Raises:
        UsageError: the checkpoint is small; or naming the family or the kind of layer.
    """
    if DELTA in config.sse:
        raise UsageError(
            f"{config.name_or_path} is a small checkpoint, which leaves to its teacher what it shares with it",
            expected="one that holds all of its tensors, since vLLM reads weight files itself",
            fix=f"serve what this makes: sse-convert join {config.name_or_path} --out WHOLE",
        )
    spec = spec_of(config)
    if spec.model_type not in SERVED:
        raise UsageError(
            f"model_type is {config.model_type!r}: vLLM does not serve converted models of this family",
            expected=f"a source among {', '.join(SERVED)}",
            fix="generate with `sse-convert generate`",
        )
    if mixed := [i for i, mixer in enumerate(layer_mixers(config)) if getattr(mixer, BY_LAYER, ())]:
        raise UsageError(
            f"layers {', '.join(map(str, mixed))} keep {BY_LAYER}, and vLLM has one kind of cache for a layer",
            expected="layers that are softmax or converted as a whole",
            fix="generate with `sse-convert generate`",
        )


@dc.dataclass(frozen=True, slots=True)
class LayerState:
    """What one request keeps of one layer on one device, one tensor after the other."""

    shapes: tuple[tuple[int, ...], ...]
    types: tuple[torch.dtype, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor, up to where the next may begin."""
        sizes = (math.prod(s) * t.itemsize for s, t in zip(self.shapes, self.types, strict=True))
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]

    def views(self, pages: Tensor) -> tuple[Tensor, ...]:
        """The tensors [rows, *shape] in pages [rows, bytes]."""
        found, first = [], 0
        for shape, dtype, size in zip(self.shapes, self.types, self.sizes, strict=True):
            used = math.prod(shape) * dtype.itemsize
            found.append(pages[:, first : first + used].view(dtype).view(-1, *shape))
            first += size
        return tuple(found)


def local_attention(vllm_config: Any) -> AttentionDims:
    """Sizes of one device's part of an attention layer."""
    dims = attention_dims(vllm_config.model_config.hf_config)
    return local_dims(dims, vllm_config.parallel_config.tensor_parallel_size)


def layer_state(vllm_config: Any, mixer: Mixer) -> LayerState:
    """What a request keeps of a layer: states in the type that was asked for, rings in the model's."""
    shapes = state_shapes(local_attention(vllm_config), mixer)
    of_states, of_rings = STATE_TYPES[vllm_config.cache_config.mamba_ssm_cache_dtype], vllm_config.model_config.dtype
    kinds = (of_states,) * isinstance(mixer, SSEMixer) + (of_rings,)
    return LayerState(shapes, kinds[: len(shapes)])


def row_bytes(vllm_config: Any) -> int:
    """Bytes of a request's row: vLLM has rows of one size for all layers, which is that of the largest."""
    mixers = {mixer for mixer in layer_mixers(vllm_config.model_config.hf_config) if mixer is not None}
    return max(sum(layer_state(vllm_config, mixer).sizes) for mixer in mixers)
