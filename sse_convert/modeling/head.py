"""From final hidden states to logits, as each family does it, for chunks of tokens that never hold all logits."""

import dataclasses as dc
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.logits import KL_BYTES, logits_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dc.dataclass(frozen=True, slots=True)
class Head:
    """How a model makes logits of its final hidden states: cap * tanh(scale * (h W^T + b) / cap)."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """`ArchSpec.logits_times` and `ArchSpec.logits_over`"""
    cap: float | None = None
    """Gemma 2 bounds its logits (`final_logit_softcapping`)"""

    @staticmethod
    def of(model: "PreTrainedModel") -> "Head":
        """The head of a causal language model. Read it anew in each forward: a sharded weight is whole only then."""
        linear: Any = model.get_output_embeddings()
        spec, config = source_spec(model.config.model_type), decoder_config(model.config)
        cap = getattr(config, "final_logit_softcapping", None)
        scale = _number(config, spec.logits_times) / _number(config, spec.logits_over)
        return Head(linear.weight, getattr(linear, "bias", None), scale, cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of hidden states [T, D], float32 or float64; the product itself runs in hidden's dtype."""
        return self.finished(self.linear(hidden))

    def linear(self, hidden: Tensor) -> Tensor:
        """h W^T + b [T, V] of hidden states [T, D], in hidden's dtype."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return F.linear(hidden, self.weight.to(hidden.dtype), bias)

    def finished(self, x: Tensor) -> Tensor:
        """Logits of h W^T + b, float32 or float64."""
        z = wide(x)
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.cap is None else torch.tanh(z / self.cap) * self.cap

    def linear_grad(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient [T, V] of h W^T + b from that of the logits; may overwrite `grad`."""
        if self.cap is not None:
            grad = grad * (1 - (logits / self.cap).square())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad

    def in_dtype(self, dtype: torch.dtype) -> "Head":
        """The same head with its weight cast once, for use in several chunks."""
        return dc.replace(self, weight=self.weight.to(dtype))


def _number(config: Any, field: str | None) -> float:
    value = None if field is None else getattr(config, field)
    return 1.0 if value is None else float(value)


def token_chunks(tokens: int, vocabulary: int, device: torch.device, logit_bytes: int = KL_BYTES) -> list[slice]:
    """Slices of T tokens whose logits are few enough to exist at a time on a device, at so many bytes each."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    size = max(1, logits_at_once(memory, logit_bytes) // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it has that."""
    return x if x.dtype == torch.float64 else x.float()
