"""The router side of an SSE layer: what it remembers of its last forward, the balance loss, health."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.kernels.routing import Routing, balance_loss, load, route
from sse_convert.kernels.torch_modes import traced, without_autocast
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.compat import in_backward
from sse_convert.modeling.initialise import NewTensors, PreciseProjection, precise_dtype

SAMPLED = 16
"""of so many tokens one is remembered where every head chooses for itself, which has logits for each head"""
UNREAD = (
    "a training step left the routers' balance loss out: where a trainer computes the loss itself, as TRL's do, "
    "add model.sse_balance_loss() to it (page Train on of sse-convert)"
)


class RouterTrace:
    """What a layer remembers of its last forward. Left out of copies and pickles: it may hold an autograd graph."""

    def __init__(self) -> None:
        self.logits_TN: Tensor | None = None
        """router logits of the last forward's real tokens, with their graph; of some tokens [T / 16, H, N], without,
        where keys choose"""
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
    sse_centroids: Tensor
    sse_route_scale: Tensor

    def __init__(self, dims: AttentionDims, mixer: SSEMixer, layer_idx: int) -> None:
        super().__init__(dims, mixer)
        self.layer_idx = layer_idx
        self.trace = RouterTrace()

    def choice_logits(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Router logits of what tokens write, and of what they read where that is chosen apart, else None: [T, N] and
        None, or by keys and queries each [T, H, N].

        Args:
            x: [T, hidden], in the router's precision.
            q: [T, Hq, D], of the sparse partitions.
            k: [T, H, D], before feature map and scale.
        """
        if self.mixer.router == "keys":
            asked = q.reshape(len(k), k.shape[1], q.shape[1] // k.shape[1], k.shape[2]).sum(2)
            return self._nearness(k, asked)
        if self.mixer.num_partitions == 1:
            return x.new_zeros(x.shape[0], 1, dtype=precise_dtype(x)), None
        logits: Tensor = self.sse_router(x)
        return logits, None

    def _nearness(self, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled cosines [T, H, N] of keys and of queries, each [T, H, D], with centroids, in float32 (float64)."""
        dtype = precise_dtype(k)
        with without_autocast(k.device.type):
            centroids = (
                F.normalize(self.sse_centroids.to(dtype), dim=-1) * self.sse_route_scale.to(dtype)[:, None, None]
            )
            written, read = (F.normalize(x.to(dtype), dim=-1) for x in (k, q))
            return torch.einsum("thd,hnd->thn", written, centroids), torch.einsum("thd,hnd->thn", read, centroids)

    def remember(self, logits: Tensor, real: Tensor | None) -> None:
        """Keep a forward's routing for the balance loss and the stats; not that of a recorded decoding step.

        Args:
            logits: [T, N] of the real tokens, or [T, H, N] where every head chooses what it writes.
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
        if self.mixer.router == "keys":
            logits = logits.detach()[::SAMPLED].clone()
            real = None if real is None else real[::SAMPLED]
        self.trace.logits_TN, self.trace.real_T = logits, real

    def routing(self) -> Routing | None:
        """The routing of the last forward's real tokens; None without a router, where every head chooses for itself,
        or before the first forward."""
        logits = self.trace.logits_TN
        if logits is None or self.mixer.num_partitions == 1 or self.mixer.router == "keys":
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
            Where every head chooses for itself, load is sorted from the busiest partition on, and all three are means
            of the heads.
        """
        with torch.no_grad():
            logits = self.trace.logits_TN
            if self.mixer.router == "keys" and logits is not None:
                health = _health([route(one, self.mixer.top_k) for one in logits.unbind(1)], self.trace.real_T)
                return health | {"load": health["load"].sort(-1, descending=True).values.mean(0)}
            routing = self.routing()
            if routing is None:
                return None
            health = _health([routing], self.trace.real_T)
            return health | {"load": health["load"][0]}


def _health(heads: list[Routing], real: Tensor | None) -> dict[str, Any]:
    """Load [heads, N] of what heads choose, and means of its entropy and of the gates."""
    loads = torch.stack([load(routing, real) for routing in heads])
    p = loads / loads.sum(-1, keepdim=True).clamp_min(torch.finfo(loads.dtype).tiny)
    gates = torch.stack([routing.gate_TN.gather(1, routing.used_TK) for routing in heads], 1)
    return {
        "load": loads,
        "entropy": float(torch.special.entr(p).sum(-1).mean()),
        "gate_mean": float((gates if real is None else gates[real]).mean()),
    }
