"""What a recurrent layer did with a batch: its operator's inputs, its routing and its branches.

Shape letters: B rows, T tokens of all rows, Hq query heads, H state heads, D key dim, V value dim, N partitions, M = N
and the shared one, K partitions written.
"""

import dataclasses as dc
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.calibration.attention_statistics import layer_inputs
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.routing import Routing
from sse_convert.kernels.torch.operands import Operands, operands_of
from sse_convert.kernels.validation import build_inputs
from sse_convert.modeling.layer import SSEAttention


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a layer's state."""

    partitions: int
    """N, without the shared one"""
    shared: bool
    """whether there is a shared partition"""
    heads: int
    """H, states per partition"""
    query_heads: int
    """Hq"""
    head_dim: int
    """D"""
    value_dim: int
    """V"""
    device: torch.device
    """where the layer is"""

    @staticmethod
    def of(layer: SSEAttention) -> "Sizes":
        """The sizes of a layer."""
        return Sizes(
            partitions=layer.mixer.num_partitions,
            shared=layer.mixer.shared_partition,
            heads=layer.state_heads,
            query_heads=layer.dims.query_heads,
            head_dim=layer.dims.head_dim,
            value_dim=layer.dims.value_dim,
            device=layer.sse_out_scale.device,
        )

    @property
    def states(self) -> int:
        """M."""
        return self.partitions + self.shared

    def zeros(self, *shape: int) -> Tensor:
        """A float64 sum to begin with."""
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One layer, one batch. Each row is a sequence that starts from an empty state."""

    operands: Operands
    """scaled queries, phi(k), values, log decays"""
    routing: Routing | None
    """None where the partition gate reads the state, so that routes exist only step by step, and where every head
    chooses for itself"""
    tokens_T: Tensor
    """int64, each token's place in the text's vocabulary"""
    sparse_TQV: Tensor
    """output of the partitions before the output norm"""
    shared_TQV: Tensor | None
    """output of the shared partition, None without one"""

    @property
    def routes(self) -> Routing:
        """The routing, of a quantity that is only asked of layers that have one."""
        assert self.routing is not None, "a quantity that needs routing met a layer without"
        return self.routing

    def written(self) -> Tensor:
        """bool [T, N], whether a token decays and writes a partition."""
        return torch.zeros_like(self.routes.gate_TN, dtype=torch.bool).scatter_(1, self.routes.write_TK, True)


def see(inputs: dict[str, Any], cu_seqlens: Tensor, tokens_T: Tensor, *, backend: str = "auto") -> Seen:
    """Run the branches of one layer apart.

    Args:
        inputs: arguments of `sse_attention` but for sequences and states.
        cu_seqlens: [rows + 1] offsets of the rows.
        tokens_T: int64 [T], each token's place in the text's vocabulary.
        backend: of the operator.
    """
    run = functools.partial(sse_attention, cu_seqlens=cu_seqlens, backend=backend)
    operands = operands_of(build_inputs(**inputs, cu_seqlens=cu_seqlens))
    gate, by_head = operands.partition_gate, inputs.get("read_logits") is not None
    routed = not by_head and (gate is None or not gate.needs_state)
    sparse_TQV, _ = run(**{**inputs, "shared": None, "shared_write_strength": None})
    shared_TQV = None
    if inputs["shared"] is not None:
        shared_TQV, _ = run(**_shared_branch(inputs))
    return Seen(
        operands=operands,
        routing=operands.route() if routed else None,
        tokens_T=tokens_T,
        sparse_TQV=sparse_TQV,
        shared_TQV=shared_TQV,
    )


@contextmanager
def watching(layers: dict[int, SSEAttention], tokens_BT: Tensor, each: Callable[[int, Seen], None]) -> Iterator[None]:
    """While the model runs on a batch, call `each` with the index of every recurrent layer and what it does.

    Args:
        layers: index -> recurrent layer.
        tokens_BT: int64 [B, tokens], each token's place in the text's vocabulary.
        each: called before the layer's own forward.
    """
    handles = [
        layer.register_forward_pre_hook(functools.partial(_before, index, tokens_BT, each), with_kwargs=True)
        for index, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(
    index: int,
    tokens_BT: Tensor,
    each: Callable[[int, Seen], None],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    assert isinstance(layer, SSEAttention)
    hidden, layout = args[0] if args else kwargs["hidden_states"], kwargs["sse_layout"]
    inputs = layer_inputs(layer, hidden, kwargs.get("position_embeddings"), layout)
    tokens_T = layout.pack(tokens_BT).to(hidden.device)
    each(index, see(inputs, layout.cu_seqlens, tokens_T, backend=layer.backend))


def _shared_branch(inputs: dict[str, Any]) -> dict[str, Any]:
    """The shared partition alone: one partition that all tokens use, without gate."""
    q, k, log_decay, *own_values = inputs["shared"]
    (v,) = own_values or (inputs["v"],)
    strength, own_strength = inputs.get("write_strength"), inputs.get("shared_write_strength")
    return {
        **inputs,
        **{"q": q, "k": k, "v": v, "log_decay": log_decay, "router_logits": k.new_zeros(len(k), 1), "shared": None},
        **{"read_logits": None, "top_k": 1, "read_top_k": None, "write_gate": False, "read_gate": False},
        **{"write_strength": strength if own_strength is None else own_strength},
        **{"shared_write_strength": None, "router_bias": None, "partition_gate": None},
    }
