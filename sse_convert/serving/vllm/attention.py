"""The layer that takes the place of an attention module of vLLM's: its projections, norms and rotation, our states."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from sse_convert.mixers import Mixer, SlidingMixer, SSESlidingMixer
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import spec_of
from sse_convert.modeling.tensors import new_tensors
from sse_convert.serving.batch import batch_of
from sse_convert.serving.head_slices import local_config, own_part
from sse_convert.serving.layer_state import ServedAttention, ServedSliding
from sse_convert.serving.ring import RingWindow
from sse_convert.serving.vllm.checks import layer_state, local_attention, row_bytes
from sse_convert.serving.vllm.metadata import StateBackend


class EngineLayer(MambaBase):
    """What vLLM asks of a converted layer, whatever its kind; goes beside a class that has `attend`."""

    kv_cache: tuple[Tensor, ...]
    qkv_proj: nn.Module
    o_proj: nn.Module

    def enter(self, prefix: str, vllm_config: Any, mixer: Mixer) -> None:
        """Take a place among the engine's layers.

        Args:
            prefix: name of the layer.
            vllm_config: the engine's configuration.
            mixer: settings of the layer.
        """
        dims = local_attention(vllm_config)
        self.prefix = prefix
        self.state, self.row_bytes = layer_state(vllm_config, mixer), row_bytes(vllm_config)
        self.widths = [heads * dims.head_dim for heads in (dims.query_heads, dims.kv_heads, dims.kv_heads)]
        self.kv_cache = (torch.tensor([]),)
        self.pages: tuple[Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take vLLM's memory: rows of bytes, in which the layer has its tensors."""
        super().bind_kv_cache(kv_cache)
        self.pages = self.state.views(self.kv_cache[0])

    @property
    def mamba_type(self) -> Any:
        """What vLLM groups layers by."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[StateBackend]:
        """What makes the layer's metadata."""
        return StateBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of a request's row."""
        return ((self.row_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of its elements."""
        return (torch.uint8,)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """What vLLM's decoder layers call.

        Args:
            positions: [T].
            hidden_states: [T, hidden], padding of recorded graphs among them.

        Returns:
            [T, hidden].
        """
        qkv, _ = self.qkv_proj(hidden_states)
        heads = hidden_states.new_empty(hidden_states.shape[0], self.widths[0])
        torch.ops.vllm.sse_attention(hidden_states, qkv, positions, heads, self.prefix)
        output: Tensor = self.o_proj(heads)[0]
        return output

    def run(self, hidden_states: Tensor, qkv: Tensor, positions: Tensor, heads: Tensor) -> None:
        """Fill in heads [T, Hq * D] of the requests that the step is about."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            heads.zero_()
            if (
                heads.is_cuda and not torch.cuda.is_current_stream_capturing()
            ):  # vLLM measures how much memory a step takes
                self._rehearse(hidden_states, qkv, positions)
            return
        batch = metadata[self.prefix].batch
        tokens = slice(0, batch.tokens)
        projected = torch.split(qkv[tokens], self.widths, -1)
        heads[tokens] = self.attend(hidden_states[tokens], projected, positions[tokens], batch, self.pages)

    def _rehearse(self, hidden_states: Tensor, qkv: Tensor, positions: Tensor) -> None:
        """The same for one request that has all tokens, with states of its own."""
        batch = batch_of(0, [len(qkv)], [1], [0], qkv.device)
        pages = self.state.views(torch.zeros(2, self.row_bytes, dtype=torch.uint8, device=qkv.device))
        self.attend(hidden_states, torch.split(qkv, self.widths, -1), positions, batch, pages)


class EngineAttention(EngineLayer, ServedAttention):
    """An SSE layer, with or without a window."""

    forward = EngineLayer.forward  # type: ignore[assignment]


class EngineSliding(EngineLayer, ServedSliding):
    """A layer of softmax attention in a window with sinks."""


def engine_layer(source: Any, vllm_config: Any, layer_idx: int, mixer: Mixer) -> EngineAttention | EngineSliding:
    """The converted layer in the place of one of vLLM's attention modules.

    Args:
        source: the module, which is taken apart.
        vllm_config: the engine's configuration.
        layer_idx: index of the layer.
        mixer: its settings.
    """
    config, dims = vllm_config.model_config.hf_config, local_attention(vllm_config)
    name, spec = source.attn.layer_name, spec_of(config)
    vllm_config.compilation_config.static_forward_context.pop(name)
    rotary, window = source.rotary_emb, None
    del source.attn, source.rotary_emb
    if isinstance(mixer, SlidingMixer | SSESlidingMixer):
        cap = getattr(config, "attn_logit_softcapping", None)
        window = RingWindow(window=mixer.window, sinks=mixer.sinks, scale=source.scaling, soft_cap=cap)
    layer: EngineAttention | EngineSliding
    if isinstance(mixer, SlidingMixer):
        assert window is not None
        layer = EngineSliding(source, dims, spec=spec, window=window, rotary=rotary)
    else:
        local = local_config(config, dims)
        layer = EngineAttention(source, local, layer_idx, spec=spec, mixer=mixer, window=window, rotary=rotary)
        rank, devices = get_tensor_model_parallel_rank(), vllm_config.parallel_config.tensor_parallel_size
        for tensor in new_tensors(attention_dims(config), mixer):
            _load_part(layer.get_parameter(tensor.name), tensor.shape, rank, devices)
    layer.enter(name.removesuffix(".attn"), vllm_config, mixer)
    return layer


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


direct_register_custom_op(
    op_name="sse_attention", op_func=_sse_attention, mutates_args=["heads"], fake_impl=_sse_attention_fake
)
