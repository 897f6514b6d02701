"""The new tensors of an SSE layer as modules, and the one rule that sets them, used by the model and by conversion."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from sse_convert.kernels.torch_modes import without_autocast
from sse_convert.kernels.triton_backend import has_kernels
from sse_convert.mixers import DECAY_NORMALIZER, SSEMixer, SSESlidingMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.tensors import new_tensors, own_dims, state_heads

ROUTER_STD = 0.02
HALF_LIVES = 16.0, 4096.0
"""tokens; heads are spread between the two, evenly in the logarithm"""
RESIDUAL_SCALE = 0.01
"""scale of SSE beside a window until calibration measures what the window misses: nearly none"""
MOST_ROWS = 64
"""tokens for which reading a weight once per token costs less than copying it into float32"""
NORM_EPS = 1e-6
"""added to the mean square of a head of SSE before its norm"""


class NewProjection(nn.Module):
    """A projection that conversion adds, uninitialised. Not an `nn.Linear`, nor called one: what quantises or adapts
    every linear layer of a model, by class or by the class's name, leaves the new ones, which are small, alone.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: whether there is one.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def extra_repr(self) -> str:
        """What printing a model says about it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, input: Tensor) -> Tensor:
        """[..., out] of input [..., in], in the weight's dtype."""
        return F.linear(input, self.weight, self.bias)


class PreciseProjection(NewProjection):
    """A projection computed in float32 (float64 for float64) whatever autocast, or a wrapper, did to its weights."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., out], in float32 (float64), of input [..., in]."""
        if keeps_precision(input):
            from sse_convert.kernels.triton.generation.precise_linear import precise_linear

            projected: Tensor = precise_linear(input, self.weight, self.bias)
            return projected
        dtype = precise_dtype(input)
        with without_autocast(input.device.type):
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(input.to(dtype), self.weight.to(dtype), bias)


def keeps_precision(x: Tensor) -> bool:
    """Whether `PreciseProjection` computes in float32 from x [..., in] as it is, so nobody should copy it first."""
    return x.numel() <= MOST_ROWS * x.shape[-1] and has_kernels(x)


def precise_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which routing, decays and norms are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class NewTensors(nn.Module):
    """The new tensors of one layer, uninitialised: projections as linear modules, the rest as they are.

    The low-rank side path of q and k runs in the model's dtype, like the projections it adds to; others are precise.

    Args:
        dims: sizes of the attention layer, of which `self.dims` are those of the heads that the mixer replaces.
        mixer: settings of the layer.
    """

    def __init__(self, dims: AttentionDims, mixer: SSEMixer) -> None:
        super().__init__()
        self.source_dims, self.dims = dims, own_dims(dims, mixer)
        self.mixer = mixer
        specs = {spec.name: spec for spec in new_tensors(dims, mixer)}
        for name, spec in specs.items():
            owner, _, kind = name.partition(".")
            if kind == "weight":
                out, inputs = spec.shape
                kind_of_linear = NewProjection if owner.startswith("sse_delta") else PreciseProjection
                self.add_module(owner, kind_of_linear(inputs, out, bias=f"{owner}.bias" in specs))
            elif not kind:
                self.register_parameter(name, nn.Parameter(torch.empty(spec.shape)))


def reset_sse_parameters(layer: NewTensors, generator: torch.Generator | None = None) -> None:
    """Set the new tensors of a layer that were not loaded from a checkpoint.

    Router rows are small, random and never zero (equal logits would tie); the low-rank side path and the per-partition
    offsets start as no change (their last factor is zero); decays start constant, with half-lives of 16 to 4096 tokens
    spread over the heads; scales start at one (SSE's beside a window at `RESIDUAL_SCALE`).

    Write strengths of the delta rule start at 1/2, the logistic function of 0, as in Gated DeltaNet. Weak ones would be
    nearly gated linear attention, since a scale of all writes cancels in the output norm.

    Args:
        layer: the layer.
        generator: source of the random numbers; None uses torch's global one.
    """
    dims, mixer = layer.source_dims, layer.mixer
    for spec in new_tensors(dims, mixer):
        tensor = layer.get_parameter(spec.name)
        if spec.name == "sse_router.weight":
            init.normal_(tensor, std=ROUTER_STD, generator=generator)
        elif spec.name.endswith("_down.weight"):
            init.normal_(tensor, std=dims.hidden**-0.5, generator=generator)
        elif spec.name.endswith("decay_up.bias"):
            init.copy_(tensor, decay_bias(dims, mixer).to(tensor))
        elif spec.name == "sse_out_scale" and isinstance(mixer, SSESlidingMixer):
            init.constant_(tensor, RESIDUAL_SCALE)
        elif spec.name.endswith("_scale"):
            init.ones_(tensor)
        else:
            init.zeros_(tensor)


def decay_bias(dims: AttentionDims, mixer: SSEMixer) -> Tensor:
    """Bias of the decay projection that gives each head its initial half-life.

    With log decay = logsigmoid(b) / DECAY_NORMALIZER and half-life h (in tokens that reach the state),
    b = -log(expm1(y)), y = log(2) * DECAY_NORMALIZER / h.

    Returns:
        float32 [H * D] for per-channel decay, [H] for one decay per head.
    """
    heads = state_heads(dims, mixer)
    shortest, longest = (math.log(h) for h in HALF_LIVES)
    position = torch.linspace(0, 1, heads, dtype=torch.float64) if heads > 1 else torch.tensor([0.5]).double()
    half_life = torch.exp(shortest + (longest - shortest) * position)
    bias = -torch.log(torch.expm1(math.log(2) * DECAY_NORMALIZER / half_life))
    return (bias.repeat_interleave(dims.head_dim) if mixer.decay == "gla" else bias).float()


def fresh_sse_tensors(
    dims: AttentionDims, mixer: SSEMixer, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The new tensors of one layer, initialised, without building the layer or its teacher weights.

    Returns:
        name below the attention module -> float32 tensor, in the order of `new_tensors`.
    """
    layer = NewTensors(dims, mixer)
    with torch.no_grad():
        reset_sse_parameters(layer, generator)
    tensors = layer.state_dict()
    return {spec.name: tensors[spec.name] for spec in new_tensors(dims, mixer)}
