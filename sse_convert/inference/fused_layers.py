"""Decoder layers of a model that decodes a few rows, in few launches, where transformers runs forty or more a layer.

Here alone is decided what is fused: layers of families whose decoder layer is norm, attention, norm and gated network,
each added to its input. An attention or a network that is not of a known kind, or whose weights are not plain, stays a
call of its module inside such a layer; other layers stay as they are. `not_fused` says which and why.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.compat import has_compiled_part
from sse_convert.inference.fused_attention import CachePart, Part, StatePart
from sse_convert.inference.fused_norms import Norm, norm_of
from sse_convert.inference.fused_weights import (
    FEW_ROWS,
    NotFusedError,
    is_transformers,
    plain_tensor,
    projection,
)
from sse_convert.inference.fused_windows import WindowPart, WindowStatePart, window_hook
from sse_convert.kernels.triton_backend import fuses
from sse_convert.modeling.compat import is_bare
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.window.window_branch import SSESlidingAttention

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
"""stems of the class names of families with such layers"""


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """In this block, steps of one token for each row run fused layers, where kernels can (see `fuses`): on a GPU,
    without gradients, in a model without compiled parts. With more than `FEW_ROWS` rows libraries do the products."""
    layers = fused(model) if fuses(model.get_input_embeddings().weight) and not has_compiled_part(model) else {}
    for layer, step in layers.items():
        layer.forward = functools.partial(step, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def fused(model: nn.Module) -> dict[nn.Module, "FusedLayer"]:
    """The decoder layers of a model that have fused steps, and these."""
    return {layer: FusedLayer(layer, family) for layer in model.modules() if (family := _family(layer))}


def not_fused(model: nn.Module) -> dict[str, str]:
    """Path of each attention or network in a known decoder layer that stays a call of its module -> why."""
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[layer]}.{part}": why for layer, step in fused(model).items() for part, why in step.not_fused.items()
    }


class FusedLayer:
    """The step of a decoder layer.

    Args:
        layer: of a family in FAMILIES.
        family: which.
    """

    def __init__(self, layer: Any, family: str) -> None:
        self._layer, self._dtype = layer, layer.input_layernorm.weight.dtype
        self.not_fused: dict[str, str] = {}
        self._attention: Part | None = None
        self._network: _Network | None = None
        try:
            self._attention = _attention_part(layer.self_attn, family, _norm(layer, "input_layernorm"), self._dtype)
        except NotFusedError as reason:
            self.not_fused["self_attn"] = str(reason)
        try:
            self._network = _Network(layer.mlp, family, _norm(layer, "post_attention_layernorm"), self._dtype)
        except NotFusedError as reason:
            self.not_fused["mlp"] = str(reason)

    def __call__(self, plain: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        """As the layer's forward, `plain`, which takes what is no step of one token."""
        batch, length = hidden_states.shape[:2]
        step = length == 1 and hidden_states.dtype == self._dtype
        if not step or torch.is_autocast_enabled(hidden_states.device.type) or not fuses(hidden_states):
            out: Tensor = plain(hidden_states, **given)
            return out
        x = hidden_states[:, 0].contiguous()
        attended = None if self._attention is None else self._attention(x, given)
        if attended is None:
            normed = self._layer.input_layernorm(x[:, None])
            attended = x + self._layer.self_attn(hidden_states=normed, **given)[0][:, 0]
        if self._network is not None and batch <= FEW_ROWS:
            return self._network(attended)[:, None]
        branch: Tensor = self._layer.mlp(self._layer.post_attention_layernorm(attended[:, None]))
        return attended[:, None] + branch


def _attention_part(attention: nn.Module, family: str, norm: Norm, dtype: torch.dtype) -> Part:
    """What computes an attention module.

    Args:
        attention: of a decoder layer.
        family: stem of the names of its classes.
        norm: of its input.
        dtype: of the model.

    Raises:
        NotFusedError: it is of another kind, or its weights are not plain.
    """
    softmax = is_transformers(attention, f"{family}Attention")
    if softmax and (hook := window_hook(attention)) is not None:
        return WindowPart(attention, hook, norm, dtype)
    if not is_bare(attention):
        raise NotFusedError("hooks stand around the attention")
    if type(attention) is SSEAttention:
        return StatePart(attention, norm, dtype)
    if type(attention) is SSESlidingAttention:
        return WindowStatePart(attention, norm, dtype)
    if softmax:
        return CachePart(attention, norm, dtype)
    raise NotFusedError(f"{type(attention).__name__} has no step of its own")


class _Network:
    """down(silu(gate(norm(x))) * up(norm(x))) + x."""

    def __init__(self, network: Any, family: str, norm: Norm, dtype: torch.dtype) -> None:
        if not (is_transformers(network, f"{family}MLP") and is_bare(network) and _is_silu(network.act_fn)):
            raise NotFusedError(f"{type(network).__name__} of another kind, of another activation, or with hooks")
        self._gate, gate_bias = projection(network, "gate_proj", dtype)
        self._up, up_bias = projection(network, "up_proj", dtype)
        self._norm, self._down = norm, projection(network, "down_proj", dtype)
        if gate_bias is not None or up_bias is not None:
            raise NotFusedError("gates with a bias")

    def __call__(self, x: Tensor) -> Tensor:
        from sse_convert.kernels.triton.generation.added_product import added_product
        from sse_convert.kernels.triton.generation.gated_product import gated_product

        inner = gated_product(x, *self._norm, self._gate, self._up)
        return added_product(inner, *self._down, x, None, 1, 0.0)


def _family(layer: nn.Module) -> str | None:
    """The family of a decoder layer that can be fused, with nothing around it."""
    family = next((family for family in FAMILIES if is_transformers(layer, f"{family}DecoderLayer")), None)
    return family if is_bare(layer) else None


def _norm(layer: nn.Module, name: str) -> Norm:
    """A norm of a layer.

    Raises:
        NotFusedError: its class is not known.
    """
    norm = norm_of(getattr(layer, name))
    if norm is None:
        raise NotFusedError(f"{name} is a {type(getattr(layer, name)).__name__}")
    return norm._replace(weight=plain_tensor(norm.weight, norm.weight.dtype, name))


def _is_silu(activation: nn.Module) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
