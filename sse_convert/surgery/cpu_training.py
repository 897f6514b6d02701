"""How fast this CPU trains a model: one layer, the head and the optimizer are timed for a few seconds."""

import dataclasses as dc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sse_convert.mixers import Mixer, mixer_to_dict
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for
from sse_convert.surgery.budget import Geometry
from sse_convert.surgery.cpu_speed import forward_flops_per_second

ROW = 512
"""tokens of the timed row"""
WEIGHT_BYTES = 12
"""of a parameter where converted layers alone are trained, about: student, teacher, gradients and moments in float32"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """This machine's CPU, with a model."""

    cores: int
    memory: int
    """bytes of the machine"""
    token: float
    """seconds of a training token, the teacher's pass included"""
    step: float
    """seconds of an optimizer step"""
    flops: float
    """FLOP/s of a forward pass in float32"""


def cpu_here(geometry: Geometry, mixer: Mixer, *, muon: bool) -> Cpu | None:
    """This CPU as it trains a model; None where its memory does not hold the model, or it has experts.

    Args:
        geometry: the model's sizes.
        mixer: of converted layers.
        muon: the optimizer; AdamW's steps take next to no time.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if geometry.has_experts or geometry.parameters * WEIGHT_BYTES > memory:
        return None
    layer, step = _layer(geometry, mixer, muon=muon)
    token = (geometry.layers * layer + _head(geometry)) / ROW
    return Cpu(
        cores=torch.get_num_threads(),
        memory=memory,
        token=token,
        step=geometry.layers * step,
        flops=forward_flops_per_second(torch.float32),
    )


def _layer(geometry: Geometry, mixer: Mixer, *, muon: bool) -> tuple[float, float]:
    """Seconds of a row in a converted layer, forward and backward, and in the teacher's; and of Muon's step of it.

    The layer is Llama's with the model's sizes, whatever family it is of.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    dims = geometry.dims
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=dims.hidden,
        intermediate_size=geometry.intermediate,
        num_hidden_layers=1,
        num_attention_heads=dims.query_heads,
        num_key_value_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        max_position_embeddings=2 * ROW,
    )
    sse = {"layers": ["own"], "mixers": {"own": mixer_to_dict(mixer)}, "base_model": "none"}
    student = model_class_for(LlamaForCausalLM)(build_config(config, sse))
    teacher = LlamaForCausalLM(config).model
    hidden = torch.randn(1, ROW, dims.hidden)

    def train() -> None:
        with torch.no_grad():
            teacher(inputs_embeds=hidden, use_cache=False)
        found = student.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        (found.square().mean() + student.sse_balance_loss()).backward()

    seconds = _seconds(train)
    matrices = [weight for weight in student.model.layers.parameters() if weight.dim() == 2]
    optimizer = torch.optim.Muon(matrices, lr=1e-3)
    return seconds, _seconds(optimizer.step) if muon else 0.0


def _head(geometry: Geometry) -> float:
    """Seconds of a row's divergence and its gradients."""
    size = geometry.vocabulary, geometry.dims.hidden
    small = geometry.dims.hidden**-0.5  # wide logits have probabilities of 1e-40, on which CPUs are slow
    own, other = (small * torch.randn(size)).requires_grad_(), small * torch.randn(size)
    hidden = torch.randn(ROW, geometry.dims.hidden, requires_grad=True)

    def train() -> None:
        target = F.log_softmax(hidden.detach() @ other.T, -1)
        torch.autograd.backward(F.kl_div(F.log_softmax(hidden @ own.T, -1), target, log_target=True, reduction="sum"))

    return _seconds(train)


def _seconds(call: Callable[[], Any]) -> float:
    """Of the faster of two calls after a first one."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
