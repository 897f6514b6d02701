"""How a batch [B, T] becomes packed sequences: padding dropped, documents apart. Made once per forward."""

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.kernels.torch_modes import traced

LAYOUT = "sse_layout"
"""keyword argument that carries it to each layer"""


@dc.dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Where the real tokens of a batch are, and where each sequence begins."""

    tokens: Tensor | None
    """int64 positions of the real tokens in the flattened batch, or None when all are real"""
    cu_seqlens: Tensor
    """int64 [S + 1], offsets of the sequences among the real tokens, on the device of the tokens"""
    max_seqlen: int
    """no sequence is longer; the host knows it without asking the device"""
    documents: bool = False
    """whether a row may hold several sequences"""
    real: Tensor | None = None
    """bool [B * T], False for padding, which then is packed too: last, as a sequence of its own. A forward that is
    traced packs so, since its shapes cannot depend on a mask. None where no padding is packed"""
    cache: Any = None
    """what holds the past, which each layer must receive; None without a cache"""

    @property
    def sequences(self) -> int:
        """S, sequences of real tokens."""
        ends = 1 if self.real is None else 2
        return self.cu_seqlens.shape[0] - ends

    def pack(self, x: Tensor) -> Tensor:
        """Real tokens [tokens, ...] of x [B, T, ...], and padding where that is packed."""
        flat: Tensor = x.flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens.to(x.device))

    def unpack(self, x: Tensor, batch: int, length: int) -> Tensor:
        """[B, T, ...] with the real tokens in their places and zeros in the padding."""
        flat = x
        if self.real is not None:
            x = torch.where(self.real.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, 0)
        if self.tokens is not None:
            flat = x.new_zeros(batch * length, *x.shape[1:]).index_copy(0, self.tokens.to(x.device), x)
        return flat.view(batch, length, *x.shape[1:])


def sequence_layout(
    shape: tuple[int, int],
    device: torch.device,
    *,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    offsets: Tensor | None = None,
    cache: Any = None,
) -> SequenceLayout:
    """Of packed rows each document is a sequence, of others each row.

    Args:
        shape: (B, T), new tokens.
        device: of the tokens.
        mask: as of `row_layout`.
        starts: as of `document_layout`; None where rows are not packed.
        offsets: as of `document_layout`.
        cache: that every layer is to receive, or None; packed rows have none.
    """
    return row_layout(*shape, mask, device, cache) if starts is None else document_layout(starts, offsets)


def row_layout(
    batch: int, length: int, mask: Tensor | None, device: torch.device | str | None = None, cache: Any = None
) -> SequenceLayout:
    """Each row is one sequence. Without padding nothing is copied between host and device, and nothing waits for it.

    Args:
        batch: B.
        length: T, new tokens per row.
        mask: bool [B, T], False for padding; None for no padding.
        device: of the tokens; None for that of the mask, or the CPU.
        cache: that the layer is to receive, or None.
    """
    if mask is None:
        rows = torch.arange(batch + 1, device=device)
        return SequenceLayout(None, rows if length == 1 else rows * length, length, cache=cache)
    ends = mask.sum(1).cumsum(0)
    if traced():
        order, total = torch.sort(~mask.flatten(), stable=True).indices, batch * length
        real = torch.arange(total, device=mask.device) < ends[-1]
        return SequenceLayout(order, F.pad(F.pad(ends, (1, 0)), (0, 1), value=total), total, real=real, cache=cache)
    return SequenceLayout(mask.flatten().nonzero()[:, 0], F.pad(ends, (1, 0)), length, cache=cache)


def document_layout(starts: Tensor, offsets: Tensor | None = None) -> SequenceLayout:
    """Each document is a sequence.

    Args:
        starts: bool [B, T], True for the first token of each document; the first of a row always is.
        offsets: int64 [S + 1], where documents begin in the flattened batch, then its length, once or more; unset means
            that the device is asked for them.
    """
    if offsets is None:
        offsets = F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
    return SequenceLayout(None, offsets, starts.shape[1], documents=True)


def document_starts(position_ids: Tensor | None, batch: int, *, look: bool = True) -> Tensor | None:
    """Where packed rows begin a new document: where positions do not continue.

    Args:
        position_ids: [1 or B, T].
        batch: B.
        look: ask the device whether there is one; otherwise there may be.

    Returns:
        bool [B, T], or None if every row is one document.
    """
    if position_ids is None or position_ids.shape[-1] == 1:
        return None
    positions = position_ids.expand(batch, -1)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts if not look or bool(starts[:, 1:].any()) else None


def handed_cache(arguments: dict[str, Any], name: str, layout: SequenceLayout | None, layer_idx: int) -> Any:
    """The cache among the arguments of an attention module, which must be the one of the forward.

    Args:
        arguments: by name.
        name: of the cache among them.
        layout: of the forward, as it arrived.
        layer_idx: of the layer, for the message.

    Raises:
        UsageError: it is another one, or there is one where the forward has none, or none where it has one; or no
            layout arrived.
    """
    if not isinstance(layout, SequenceLayout):
        raise UsageError(
            f"layer {layer_idx} received no {LAYOUT}",
            expected="a decoder layer that hands its keyword arguments to its attention",
            fix="call the model, not the layer, or pass sse_layout=row_layout(batch, length, mask)",
        )
    cache = arguments.get(name)
    if cache is not layout.cache:
        raise UsageError(
            f"layer {layer_idx} received {_named(cache)} as {name}, and its model has {_named(layout.cache)}",
            expected="the model's own cache, which holds the states of converted layers",
            fix="call the model, not the layer; in training with gradient checkpointing pass use_cache=False; "
            "otherwise use versions of transformers and of this package that were tried together",
        )
    return cache


def _named(cache: Any) -> str:
    return "no cache" if cache is None else f"a {type(cache).__name__}"


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Positions [1 or B, T] in the row, of what a model takes as `position_ids`.

    Args:
        position_ids: these; or of rotations by time, height and width, [1 or 3, B, T], which say nothing of the row
            (None is returned), or [4, B, T], with these first.
    """
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def padding_mask(attention_mask: Any, length: int) -> Tensor | None:
    """The part of a 2D attention mask that covers the new tokens.

    Args:
        attention_mask: [B, past + T], or None.
        length: T.

    Returns:
        bool [B, T], or None if nothing is padded, which a forward that is traced cannot know.

    Raises:
        UsageError: the mask is a custom one (4D or not a tensor), which recurrent layers cannot follow.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise UsageError(
            f"attention_mask has shape {shape}",
            expected="a padding mask [batch, tokens]: SSE layers are recurrent and cannot follow a custom mask",
            fix="pass a padding mask, or position_ids that restart at each packed document",
        )
    mask = attention_mask[:, -length:].bool()
    return mask if traced() or not bool(mask.all()) else None


def positions_from_offsets(cu_seq_lens: Tensor, length: int) -> Tensor:
    """position_ids [1, T] that restart at each offset of one packed row.

    Args:
        cu_seq_lens: [documents + 1] offsets.
        length: T.
    """
    starts = cu_seq_lens[:-1].long()
    position = torch.arange(length, device=cu_seq_lens.device)
    return (position - starts[torch.searchsorted(starts, position, right=True) - 1])[None]
