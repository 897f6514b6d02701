"""The router side of an SSE layer: what it remembers of its last forward, the balance loss, health."""

import warnings
from typing import Any

import torch
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.kernels.routing import Routing, balance_loss, load, route
from sse_convert.kernels.torch_modes import traced
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.compat import in_backward
from sse_convert.modeling.initialise import NewTensors, PreciseProjection, precise_dtype

UNREAD = (
    "a training step left the routers' balance loss out: where a trainer computes the loss itself, as TRL's do, "
    "add model.sse_balance_loss() to it (page Train on of sse-convert)"
)


class RouterTrace:
    """What a layer remembers of its last forward. Left out of copies and pickles: it may hold an autograd graph."""

    def __init__(self) -> None:
        self.logits_TN: Tensor | None = None
        """router logits of the last forward's real tokens, with their graph"""
        self.real_T: Tensor | None = None
        """False for what is padding among those tokens after all; None for nothing (see `SequenceLayout.real`)"""
        self.unread = False
        """whether nobody has asked for the balance loss of the last training forward"""

    def forget(self) -> None:
        """Let go of the last forward's graph, which may in turn hold the whole model and what a forward keeps."""
        self.logits_TN = self.real_T = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RouterTrace, ()


class RoutedLayer(NewTensors):
    """A layer's new tensors, with what trainers ask of its router.

    Args:
        dims: sizes of the attention layer.
        mixer: settings of the layer.
        layer_idx: index of the layer.
    """

    sse_router: PreciseProjection

    def __init__(self, dims: AttentionDims, mixer: SSEMixer, layer_idx: int) -> None:
        super().__init__(dims, mixer)
        self.layer_idx = layer_idx
        self.trace = RouterTrace()

    def router_logits(self, x: Tensor) -> Tensor:
        """[T, N] of x [T, hidden], in the router's precision; zeros where there is one partition."""
        if self.mixer.num_partitions == 1:
            return x.new_zeros(x.shape[0], 1, dtype=precise_dtype(x))
        logits: Tensor = self.sse_router(x)
        return logits

    def remember(self, logits: Tensor, real: Tensor | None) -> None:
        """Keep a forward's routing for the balance loss and the stats; not that of a recorded decoding step.

        Args:
            logits: [T, N] of the real tokens.
            real: bool [T], False for padding among those tokens; None for none.
        """
        if traced() and not torch.is_grad_enabled():
            return  # a recorded forward is run again without this code, and its tensors are overwritten
        if not traced():
            if in_backward():
                return  # checkpointing repeats a forward inside the backward pass; its graph would stay alive
            if self.trace.unread:
                warnings.warn(UNREAD, stacklevel=2)
            self.trace.unread = self.training and logits.requires_grad and self.mixer.balance == "aux_loss"
        self.trace.logits_TN, self.trace.real_T = logits, real

    def routing(self) -> Routing | None:
        """The routing of the last forward's real tokens; None without a router, or before the first forward."""
        logits = self.trace.logits_TN
        if logits is None or self.mixer.num_partitions == 1:
            return None
        return route(logits, self.mixer.top_k)

    def balance_loss(self) -> Tensor | None:
        """The weighted balance loss of the last forward, 0-d; None if this layer is not balanced by a loss.

        Raises:
            UsageError: the forward ran under reentrant gradient checkpointing, which cuts the loss off its graph.
        """
        self.trace.unread = False
        if self.mixer.balance != "aux_loss" or (routing := self.routing()) is None:
            return None
        if torch.is_grad_enabled() and self.sse_router.weight.requires_grad and not routing.gate_TN.requires_grad:
            raise UsageError(
                f"layer {self.layer_idx}: the balance loss has no gradient under reentrant gradient checkpointing",
                expected="non-reentrant checkpointing, or balance: none",
                fix='gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
            )
        return self.mixer.balance_coef * balance_loss(routing, self.trace.real_T)

    def router_stats(self) -> dict[str, Any] | None:
        """Health of the last forward's routing; None without a router.

        Returns:
            load: [N], shares that sum to top_k; entropy: of the load, in nats; gate_mean: e of partitions written.
        """
        with torch.no_grad():
            routing, real = self.routing(), self.trace.real_T
            if routing is None:
                return None
            shares = load(routing, real)
            p = shares / shares.sum().clamp_min(torch.finfo(shares.dtype).tiny)
            gates = routing.gate_TN.gather(1, routing.used_TK)
            return {
                "load": shares,
                "entropy": float(torch.special.entr(p).sum()),
                "gate_mean": float((gates if real is None else gates[real]).mean()),
            }
