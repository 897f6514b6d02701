"""Rows that several ranks hold together: each has some of the tokens, and attends with some of the heads to all.

All heads of a token share its routing and nothing else, so heads do not depend on each other. Each rank sends the other
ranks their heads of its tokens, runs its own heads over whole rows, and sends the results back (Ulysses,
arXiv:2309.14509). Ranks have consecutive tokens of a row. Everything outside of attention is done token by token.

Shape letters: B rows, T tokens of a whole row, P ranks, t = T / P tokens of a rank, H heads, D width of a head.
"""

import contextlib
import dataclasses as dc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from sse_convert.errors import UsageError
from sse_convert.mixers import Mixer
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import (
    AttentionDims,
    bounds_scores,
    dims_by_layer,
    has_other_masks,
    native_windows,
)
from sse_convert.modeling.document_attention import attend_to_documents
from sse_convert.modeling.layout import document_starts, padding_mask
from sse_convert.modeling.sink_attention import attend_with_sinks
from sse_convert.modeling.tensors import own_dims

CONTEXT_ATTENTION = "sse_context"
"""name under which transformers finds `context_attention`; it has no masks made for it"""
_BY_HEAD = ("q", "k", "v", "log_decay")
_STRENGTHS = ("write_strength", "shared_write_strength")


@dc.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's place among those that hold the same rows."""

    group: Any
    """process group of the ranks, in the order of their tokens"""
    rank: int
    """of this process in the group"""
    size: int
    """P"""
    positions: Tensor
    """int64 [B, T] of the whole rows, on the device of the tokens"""
    starts: Tensor | None
    """bool [B, T], first tokens of packed documents, on that device; None for one document per row"""
    offsets: Tensor
    """int64 [S + 1], where documents begin in the flattened rows, and B * T, on that device"""

    @staticmethod
    def of(group: Any, positions: Tensor, device: torch.device) -> "Shard":
        """The place of this process.

        Args:
            group: of the ranks.
            positions: int64 [B, T] of whole rows, best on the CPU: it is looked at.
            device: of the tokens.
        """
        first = torch.ones_like(positions, dtype=torch.bool)
        first[:, 1:] = positions.diff(dim=1) != 1
        offsets = F.pad(first.flatten().nonzero()[:, 0], (0, 1), value=positions.numel()).to(device)
        starts = document_starts(positions, len(positions))
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return Shard(group, rank, size, positions.to(device), None if starts is None else starts.to(device), offsets)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.positions.shape[0], self.positions.shape[1]

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens [B, t, ...] of whole rows [B, T, ...]."""
        return x.chunk(self.size, 1)[self.rank].contiguous()

    def to_heads(self, x: Tensor) -> Tensor:
        """[B * t, ..., H, D] of this rank's tokens as [B * T, ..., H / P, D] of this rank's heads.

        Fewer heads than ranks are repeated, so that neighbours have the same one.
        """
        batch, length = self.shape
        x = self._repeated(x, -2)
        parts = _split(_split(x, -2, self.size, -1), 0, batch, length // self.size).movedim(-3, 0)
        whole: Tensor = _exchange(parts, self.group)
        return whole.movedim(0, 1).flatten(0, 2)

    def to_rows(self, x: Tensor) -> Tensor:
        """[B * T, H / P, D] of this rank's heads as [B * t, H, D] of this rank's tokens."""
        batch, length = self.shape
        parts = _split(x, 0, batch, self.size, length // self.size).movedim(1, 0)
        own: Tensor = _exchange(parts, self.group)
        return own.movedim(0, 2).flatten(2, 3).flatten(0, 1)

    def whole(self, x: Tensor) -> Tensor:
        """[B * T, ...] of the whole rows from [B * t, ...] of each rank; gradients are summed over the ranks."""
        batch, length = self.shape
        parts = _split(x, 0, batch, length // self.size)
        found: Tensor = _gather(parts, self.group, self.size)
        return found.movedim(0, 1).flatten(0, 2)

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of one value per head [H]."""
        return self._repeated(x, 0).chunk(self.size)[self.rank]

    def _repeated(self, x: Tensor, dim: int) -> Tensor:
        heads = x.shape[dim]
        return x if heads % self.size == 0 else x.repeat_interleave(self.size // heads, dim)


class _Exchange(torch.autograd.Function):
    """Part p of x [P, ...] goes to rank p; what comes is stacked by where it is from. Its own inverse and transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    found = x.new_empty(x.shape)  # `empty_like` may keep another order of dimensions
    dist.all_to_all_single(found, x, group=group)
    return found


class _Gather(torch.autograd.Function):
    """[P, ...] of all ranks; the gradient of a rank's own part is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        found = x.new_empty(size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=group)
        return _split(found, 0, size, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return own, None, None


def _split(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """x with a dimension split."""
    parts: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return parts


# not compiled: in a compiled backward, these and what FSDP sends could come in another order on another rank
_exchange = torch.compiler.disable(_Exchange.apply)  # type: ignore[no-untyped-call]
_gather = torch.compiler.disable(_Gather.apply)  # type: ignore[no-untyped-call]
_held: Shard | None = None


def current_shard() -> Shard | None:
    """How rows are split now; None for rows that this process has whole."""
    return _held


@contextlib.contextmanager
def sharded(shard: Shard) -> Iterator[None]:
    """Split rows so in forwards, and in the backwards that follow: gradient checkpoints repeat forwards there, in
    threads of the autograd engine, which is why this is no context variable."""
    global _held
    before, _held = _held, shard
    try:
        yield
    finally:
        _held = before


def split_problems(config: Any, ranks: int, mixers: Iterable[Mixer | None] = ()) -> list[str]:
    """Why a model cannot have its rows on so many ranks, as far as its configuration says.

    Args:
        config: of a model of a known family, plain or converted.
        ranks: P. Key-value heads may be fewer, and are repeated then.
        mixers: those in use.
    """
    every, spec, config = dims_by_layer(config), source_spec(config.model_type), decoder_config(config)
    every = (*every, *(part for mixer in mixers if mixer is not None for part in _parts(every[0], mixer)))
    query = next((dims.query_heads for dims in every if dims.query_heads % ranks), 0)
    uneven = {dims.kv_heads for dims in every if dims.kv_heads % ranks and ranks % dims.kv_heads}
    holds = {
        f"does not divide {query} query heads": query != 0,
        f"neither divides {max(uneven, default=0)} key-value heads nor is a multiple": bool(uneven),
        "is not built for layers that have linear attention of their own": spec.linear_layers,
        "is not built for windows that the masks alone have": spec.windows_in_masks and any(native_windows(config)),
        "is not built for masks of another kind than causal ones and windows": has_other_masks(config),
        "is not built for bounded attention scores": bounds_scores(config),
        "is not built for a balance loss of experts (output_router_logits)": bool(
            getattr(config, "output_router_logits", False)
        ),
    }
    return [f"context_parallel is {ranks}, which {problem}" for problem, found in holds.items() if found]


def _parts(dims: AttentionDims, mixer: Mixer) -> list[AttentionDims]:
    """Heads with a mixer and heads that see the whole row, in layers that have both."""
    own = own_dims(dims, mixer)
    return [] if own == dims else [own, dims.without(own.kv_heads)]


def check_part(shard: Shard, tokens: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Any) -> None:
    """Check a model's arguments where rows are split.

    Args:
        shard: how.
        tokens: [B, t, ...] of this rank.
        attention_mask: as given to the model.
        position_ids: of those tokens.
        cache: as given to the model.

    Raises:
        UsageError: padding, a cache, no positions, or other tokens than the split's.
    """
    batch, length = shard.shape
    if padding_mask(attention_mask, tokens.shape[1]) is not None:
        raise _refused("padding", "rows full of tokens", "pack documents into whole rows and drop attention_mask")
    if cache is not None:
        raise _refused("a cache", "training and evaluation of whole rows", "generate on one GPU")
    if position_ids is None or tuple(tokens.shape[:2]) != (batch, length // shard.size):
        given = f"tokens {list(tokens.shape[:2])} and {'no' if position_ids is None else 'their'} position_ids"
        expected = f"tokens and position_ids [{batch}, {length // shard.size}] of this rank"
        raise _refused(given, expected, "cut rows with `Shard.own`")


def _refused(what: str, expected: str, fix: str) -> UsageError:
    return UsageError(f"context parallelism with {what}", expected=expected, fix=fix)


def operator_heads(inputs: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """The operator's inputs of this rank's heads and whole rows.

    Args:
        inputs: of this rank's tokens and all heads, as `SSEAttention.operator_inputs` gives them.
        shard: where they go.
    """
    sent: dict[int, Tensor] = {}  # partitions may share their queries, keys and decays

    def heads(x: Tensor) -> Tensor:
        if id(x) not in sent:
            alike = x.stride(-1) == 0  # one value for all channels
            own = shard.to_heads(x[..., :1] if alike else x)
            sent[id(x)] = own.expand(*own.shape[:-1], x.shape[-1])
        return sent[id(x)]

    found = {**inputs, **{name: heads(inputs[name]) for name in _BY_HEAD}}
    found["router_logits"] = shard.whole(inputs["router_logits"])
    found["shared"] = None if inputs["shared"] is None else tuple(map(heads, inputs["shared"]))
    for name in _STRENGTHS:
        found[name] = None if inputs[name] is None else shard.to_heads(inputs[name][..., None])[..., 0]
    found["k_scale"] = None if inputs["k_scale"] is None else shard.own_heads(inputs["k_scale"])
    return found


def to_attention(x: Tensor, shard: Shard) -> Tensor:
    """[B, H, t, D] of this rank's tokens as [B, H / P, T, D]."""
    whole = shard.to_heads(x.transpose(1, 2).flatten(0, 1))
    return _split(whole, 0, *shard.shape).transpose(1, 2)


def from_attention(heads: Tensor, shard: Shard) -> Tensor:
    """[B, T, H / P, D] as [B, t, H, D] of this rank's tokens."""
    return _split(shard.to_rows(heads.flatten(0, 1)), 0, shard.shape[0], -1)


def softmax_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, with as many queries per key as the shapes say, which is all that a rank knows.

    Args:
        module: the attention module; not used.
        query: [B, Hq, T, D].
        key: [B, H, keys, D].
        value: [B, H, keys, D].
        mask: bool, True where a query sees a key; None for causal.
        dropout: of the weights.
        scaling: of the products; None for D ** -0.5.
        s_aux: learned sinks of all ranks' heads; None for none.
        kwargs: what families pass to their attention functions.

    Returns:
        [B, T, Hq, D], and None for the weights.

    Raises:
        UsageError: the family bounds its scores.
    """
    _refuse_bounds(kwargs)
    if (sinks := _own_sinks(s_aux)) is not None:
        return attend_with_sinks(query, key, value, mask, sinks, scaling, dropout), None
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:  # attention kernels share keys under no mask alone
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    causal = mask is None
    o = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=causal and groups > 1
    )
    return o.transpose(1, 2), None


def context_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Softmax attention of rows that several ranks hold together, each document by itself. As `softmax_attention`, with
    this rank's tokens only.

    Raises:
        UsageError: rows are not split; or the family bounds its scores.
    """
    shard = current_shard()
    if shard is None:
        raise UsageError(
            f"attention implementation {CONTEXT_ATTENTION!r}, and rows are not split",
            expected="a forward within `sharded`",
            fix="load the model without attn_implementation",
        )
    _refuse_bounds(kwargs)
    length, window = shard.shape[1], kwargs.get("sliding_window")
    window = None if window is None or window >= length else window
    sinks, scaling = _own_sinks(kwargs.get("s_aux")), kwargs.get("scaling")
    q, k, v = (to_attention(x, shard).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    heads = attend_to_documents(q, k, v, shard.offsets, length, scaling=scaling, window=window, sinks=sinks)
    return from_attention(_split(heads, 0, *shard.shape), shard), None


def _own_sinks(sinks: Tensor | None) -> Tensor | None:
    """Learned sinks of the heads that this rank has."""
    shard = current_shard()
    return sinks if sinks is None or shard is None else shard.own_heads(sinks)


def _refuse_bounds(kwargs: dict[str, Any]) -> None:
    if kwargs.get("softcap") is not None:
        raise _refused("bounded attention scores", "attention without them", "set context_parallel: 1")


AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
