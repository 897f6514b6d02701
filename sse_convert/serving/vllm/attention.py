"""The layer that takes the place of an attention module of vLLM's: its projections, norms and rotation, our states."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from sse_convert.mixers import SSEMixer
from sse_convert.modeling.architectures import attention_dims
from sse_convert.modeling.configuration import spec_of
from sse_convert.modeling.tensors import new_tensors
from sse_convert.serving.batch import batch_of
from sse_convert.serving.head_slices import local_config, own_part
from sse_convert.serving.layer_state import ServedAttention
from sse_convert.serving.vllm.checks import states_of
from sse_convert.serving.vllm.metadata import StateBackend


class EngineAttention(ServedAttention, MambaBase):
    """An SSE layer in vLLM.

    Args:
        source: vLLM's attention module of the layer, which it takes apart.
        vllm_config: the engine's configuration.
        layer_idx: index of the layer.
        mixer: its settings.
    """

    def __init__(self, source: Any, vllm_config: Any, layer_idx: int, mixer: SSEMixer) -> None:
        config = vllm_config.model_config.hf_config
        layers = vllm_config.compilation_config.static_forward_context
        name = source.attn.layer_name
        layers.pop(name)
        rotary = source.rotary_emb
        del source.attn, source.rotary_emb
        dims, self_shapes, self_types = states_of(vllm_config)
        super().__init__(
            source, local_config(config, dims), layer_idx, spec=spec_of(config), mixer=mixer, rotary=rotary,
            scale=source.scaling, soft_cap=getattr(config, "attn_logit_softcapping", None),
        )  # fmt: skip
        self.prefix = name.removesuffix(".attn")
        self.shapes, self.types = self_shapes, self_types
        self.sizes = [heads * dims.head_dim for heads in (dims.query_heads, dims.kv_heads, dims.kv_heads)]
        self.kv_cache: tuple[Tensor, ...] = (torch.tensor([]),)
        layers[self.prefix] = self
        rank, devices = get_tensor_model_parallel_rank(), vllm_config.parallel_config.tensor_parallel_size
        whole = {spec.name: spec.shape for spec in new_tensors(attention_dims(config), mixer)}
        for tensor, shape in whole.items():
            _load_part(self.get_parameter(tensor), shape, rank, devices)

    @property
    def mamba_type(self) -> Any:
        """What vLLM groups layers by."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[StateBackend]:
        """What makes the layer's metadata."""
        return StateBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of what a request keeps here."""
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of each of them."""
        return self.types

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """What vLLM's decoder layers call.

        Args:
            positions: [T].
            hidden_states: [T, hidden], padding of recorded graphs among them.

        Returns:
            [T, hidden].
        """
        qkv, _ = self.qkv_proj(hidden_states)
        heads = hidden_states.new_empty(hidden_states.shape[0], self.sizes[0])
        torch.ops.vllm.sse_attention(hidden_states, qkv, positions, heads, self.prefix)
        output, _ = self.o_proj(heads)
        return output

    def run(self, hidden_states: Tensor, qkv: Tensor, positions: Tensor, heads: Tensor) -> None:
        """Fill in heads [T, Hq * D] of the requests that the step is about."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            heads.zero_()
            if heads.is_cuda:  # vLLM measures how much memory a step takes
                self._rehearse(hidden_states, qkv, positions)
            return
        batch = metadata[self.prefix].batch
        tokens = slice(0, batch.tokens)
        projected = qkv[tokens].split(self.sizes, -1)
        heads[tokens] = self.attend(hidden_states[tokens], projected, positions[tokens], batch, self.kv_cache)

    def _rehearse(self, hidden_states: Tensor, qkv: Tensor, positions: Tensor) -> None:
        """The same for one request that has all tokens, with states of its own."""
        batch = batch_of(0, [len(qkv)], [1], [0], qkv.device)
        pages = tuple(
            qkv.new_zeros(2, *shape, dtype=dtype) for shape, dtype in zip(self.shapes, self.types, strict=True)
        )
        self.attend(hidden_states, qkv.split(self.sizes, -1), positions, batch, pages)


def _load_part(parameter: nn.Parameter, whole: tuple[int, ...], rank: int, devices: int) -> None:
    """Have vLLM's loader put this device's part of a stored tensor into a parameter."""

    def load(parameter: nn.Parameter, stored: Tensor) -> None:
        assert tuple(stored.shape) == whole, f"stored as {tuple(stored.shape)}, expected {whole}"
        parameter.data.copy_(own_part(stored, tuple(parameter.shape), rank, devices))

    parameter.weight_loader = load  # type: ignore[attr-defined]


def _sse_attention(hidden_states: Tensor, qkv: Tensor, positions: Tensor, heads: Tensor, layer_name: str) -> None:
    """The operator around which vLLM cuts the compiled model."""
    layer: Any = get_forward_context().no_compile_layers[layer_name]
    layer.run(hidden_states, qkv, positions, heads)


def _sse_attention_fake(hidden_states: Tensor, qkv: Tensor, positions: Tensor, heads: Tensor, layer_name: str) -> None:
    return


assert issubclass(EngineAttention, AttentionLayerBase)
direct_register_custom_op(
    op_name="sse_attention", op_func=_sse_attention, mutates_args=["heads"], fake_impl=_sse_attention_fake
)
