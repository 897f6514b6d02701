"""Calls of the chunked kernels: everything that changes what they do, and every result next to float64."""

import dataclasses as dc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.triton import autograd as operator
from sse_convert.kernels.triton.autograd import sse_attention_triton
from sse_convert.kernels.validation import build_inputs
from tests.kernels.cases import SHARED_NAMES, Case
from tests.tolerance import assert_same

Inputs = dict[str, Tensor]
EXTREME = torch.tensor([0.0, -1e-6, -5.0, -20.0, -80.0], dtype=torch.float64)
DECAYS = ("log_decay", "shared log_decay")
KEYS = ("k", "shared k")
WHOLE = ("initial_state", "k_scale")
"""inputs without tokens"""
LAYOUTS = {"aligned": math.inf, "packed": -1.0}
"""padding that a call without states must bear"""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DELTA_TOLERANCE = {**TOLERANCE, torch.bfloat16: 8e-3, torch.float16: 8e-3}
"""the delta rule rounds what it reads, solves for and writes to bfloat16 before gated linear attention begins"""


@dc.dataclass(frozen=True, kw_only=True)
class Trial(Case):
    """A case with the settings that only some backends see the inside of. Without states unless `initial_state`."""

    lengths: tuple[int, ...] = (70, 3)
    heads: int = 1
    dim: int = 16
    value_dim: int = 16
    initial_state: bool = False
    final_state: bool = False
    """carry states out, from zeros if none come in"""
    dtype: torch.dtype = torch.float32
    """of q, k, v, and of gate logits"""
    decays: str = "mild"
    """mild | mixed (per token and channel, up to -80) | a number for all"""
    target: int | None = None
    """the partition that nearly every token prefers"""
    k_map: str = "identity"
    k_scale: bool = False
    normalizer: float | None = None

    def options(self) -> dict[str, Any]:
        own = {"k_map": self.k_map, "decay_normalizer": self.normalizer, "scale": 0.3}
        return {**super().options(), **own}

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        x = super().inputs()
        generator = torch.Generator().manual_seed(self.seed + 10)
        for name in [n for n in KEYS if n in x and self.k_map != "identity"]:
            x[name] = torch.randn(x[name].shape, generator=generator, dtype=torch.float64)
        for name in [n for n in DECAYS if n in x]:
            x[name] = self._decays(x[name], generator)
        if self.target is not None:
            x["router_logits"][:, self.target] += 4.0
        if self.k_scale:
            x["k_scale"] = torch.rand(self.heads, generator=generator, dtype=torch.float64) + 0.5
        return {name: tensor.to(dtype) for name, tensor in x.items()}

    def _decays(self, mild: Tensor, generator: torch.Generator) -> Tensor:
        if self.normalizer is not None:
            return 3 * torch.randn(mild.shape, generator=generator, dtype=mild.dtype)
        if self.decays == "mixed":
            return EXTREME[torch.randint(len(EXTREME), mild.shape, generator=generator)]
        return mild if self.decays == "mild" else torch.full_like(mild, float(self.decays))

    def rounded(self, device: str) -> Inputs:
        """The inputs as a model holds them: q, k, v and gate logits in `dtype`, everything else in float32."""
        full = ("router_logits", "initial_state", "k_scale", *(() if self.normalizer else DECAYS))
        return {name: x.to(device, torch.float32 if name in full else self.dtype) for name, x in self.inputs().items()}


def call(trial: Trial, x: Inputs, backend: str = "triton") -> tuple[Tensor, Tensor | None]:
    """Output and final state; of the chunked kernels without the checks of dispatch."""
    shared = tuple(x[name] for name in SHARED_NAMES if name in x) or None
    tensors = {name: tensor for name, tensor in x.items() if name not in SHARED_NAMES}
    options = {n: o.to(x["q"].device) if isinstance(o, Tensor) else o for n, o in trial.options().items()}
    final = trial.initial_state or trial.final_state
    if backend == "triton":
        given = build_inputs(**tensors, shared=shared, **options)
        return sse_attention_triton(given, output_final_state=final)
    return sse_attention(**tensors, shared=shared, **options, output_final_state=final, backend=backend)


def results(trial: Trial, inputs: Inputs, backend: str = "triton") -> dict[str, Tensor]:
    """Output, final state, and the gradient of a fixed random combination of both in every input."""
    x = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    o, final = call(trial, x, backend)
    found = {"o": o} if final is None else {"o": o, "final": final}
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found.values()]
    weights = [w.to(inputs["v"].dtype if inputs["v"].dtype != torch.float64 else trial.dtype) for w in weights]
    losses = [(y * w.to(y)).sum() for y, w in zip(found.values(), weights, strict=True)]
    gradients = torch.autograd.grad(losses, list(x.values()), materialize_grads=True)
    named = {f"d {name}": gradient for name, gradient in zip(x, gradients, strict=True)}
    return {**{name: y.detach() for name, y in found.items()}, **named}


def exact_results(trial: Trial, inputs: Inputs) -> dict[str, Tensor]:
    """`results` in float64, by the torch operator."""
    return results(trial, {name: x.double() for name, x in inputs.items()}, "varlen")


def assert_right(trial: Trial, inputs: Inputs) -> None:
    """All results are within the tolerance of their dtype; what vanishes in float64 (decays of e^-80) vanishes.

    The gradient of each k_scale is one sum, which may cancel to anything; its error is a part of its terms' norm.
    """
    found, exact = results(trial, inputs), exact_results(trial, inputs)
    tolerance = (DELTA_TOLERANCE if trial.delta else TOLERANCE)[trial.dtype]
    if "d k_scale" in exact:
        error = (found.pop("d k_scale").double() - exact.pop("d k_scale")) / _terms_of_k_scale(inputs, exact)
        assert error.abs().max() <= tolerance, f"d k_scale: {error.abs().max():.1e} of its terms"
    for name, expected in exact.items():
        expected = torch.zeros_like(expected) if expected.norm() < 1e-20 else expected
        assert_same(found[name], expected, name, tolerance)


def _terms_of_k_scale(inputs: Inputs, exact: Inputs) -> Tensor:
    """Norm of the terms, one for each entry of a key, whose sum is the gradient of each k_scale."""
    keys = [inputs[name].double() * exact[f"d {name}"] for name in KEYS if name in inputs]
    return torch.cat([k.movedim(-2, -1).flatten(0, -2) for k in keys]).norm(dim=0) / inputs["k_scale"]


def lay_out(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Force a layout on calls without states."""
    monkeypatch.setattr(operator, "PADDING_BEARABLE", LAYOUTS[layout])


def rows(x: Inputs, start: int, end: int) -> Inputs:
    """Tokens start to end of every input that has tokens."""
    return {name: t if name in WHOLE else t[start:end] for name, t in x.items()}


def splice(first: Inputs, second: Inputs, at: int) -> Inputs:
    """Tokens of `first` up to `at`, of `second` from there on."""
    return {name: t if name in WHOLE else torch.cat([t[:at], second[name][at:]]) for name, t in first.items()}


def forward(trial: Trial, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Output and final state, nothing recorded."""
    with torch.no_grad():
        return call(trial, x)
