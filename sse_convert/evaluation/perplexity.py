"""Held-out loss (nats per token) and bits per byte, by the number of tokens a prediction could look back on.

Shapes: R windows, T tokens per window, V vocabulary. Logits exist for a bounded number of positions at a time, never
for a whole window.
"""

import dataclasses as dc
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.console import Bar
from sse_convert.errors import CheckpointError, DataError
from sse_convert.evaluation.intervals import Z95, ratio_standard_error
from sse_convert.evaluation.long_rows import LongRows
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.head import Head, token_chunks
from sse_convert.report import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIRST_EDGE = 64


@dc.dataclass(frozen=True, slots=True)
class Windows:
    """Held-out text cut into windows, the same for every model that is compared."""

    input_ids: Tensor
    """[R, T] token ids"""
    position_ids: Tensor
    """[R, T] positions; a reset starts a new document, and its first token is not scored"""
    edges: tuple[int, ...]
    """bucket i holds predictions with edges[i] <= context < edges[i + 1] tokens of context"""
    bucket: Tensor
    """[R, T - 1] bucket of each prediction, -1 where it is not scored"""
    byte_counts: Tensor
    """[R, buckets] UTF-8 bytes of the predicted text"""


@dc.dataclass(frozen=True, slots=True)
class PositionLoss:
    """Loss of the predictions with a similar amount of context."""

    start: int
    """fewest tokens of context"""
    stop: int
    """most tokens of context, plus one"""
    tokens: int
    """predictions"""
    loss: float
    """nats per token"""
    loss_se: float | None
    """standard error over windows, None with one window"""
    bits_per_byte: float
    """bits per UTF-8 byte of the predicted text"""


@dc.dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Loss of one model on windows of one length."""

    length: int
    """tokens per window"""
    windows: int
    """windows"""
    tokens: int
    """predictions"""
    loss: float
    """nats per token"""
    loss_se: float | None
    """standard error over windows, None with one window"""
    bits_per_byte: float
    """bits per UTF-8 byte of the predicted text"""
    buckets: tuple[PositionLoss, ...]
    """the same by tokens of context"""
    window_sums: tuple[float, ...] = ()
    """summed loss of each window, to pair models window by window; not stored"""
    window_counts: tuple[int, ...] = ()
    """predictions of each window; not stored"""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready, with a 95% interval (normal) and without the per-window figures."""
        data = {f.name: getattr(self, f.name) for f in dc.fields(self) if not f.name.startswith("window_")}
        spread = None if self.loss_se is None else Z95 * self.loss_se
        data["loss_low"] = None if spread is None else self.loss - spread
        data["loss_high"] = None if spread is None else self.loss + spread
        data["buckets"] = [dc.asdict(bucket) for bucket in self.buckets]
        return data


def loss_gap(student: HeldOutLoss, teacher: HeldOutLoss) -> tuple[float, float | None]:
    """Student loss minus teacher loss in nats per token, and its standard error from paired windows."""
    sums = [s - t for s, t in zip(student.window_sums, teacher.window_sums, strict=True)]
    return student.loss - teacher.loss, ratio_standard_error(sums, student.window_counts)


def bucket_edges(length: int) -> tuple[int, ...]:
    """0, 64, 128, 256 ... and the window length."""
    edges = [0]
    edge = FIRST_EDGE
    while edge < length:
        edges.append(edge)
        edge *= 2
    return (*edges, length)


def make_windows(
    input_ids: Tensor, tokenizer: "PreTrainedTokenizerBase", position_ids: Tensor | None = None
) -> Windows:
    """Prepare windows for `held_out_loss`.

    Args:
        input_ids: [R, T] token ids.
        tokenizer: counts the bytes of the predicted text. Special tokens have none.
        position_ids: [R, T] positions that restart at 0 with each document; unset means one document per window.

    Raises:
        DataError: there is nothing to predict.
    """
    rows, length = input_ids.shape
    if rows == 0 or length < 2:
        raise DataError(
            f"held-out text gives {counted(rows, 'window')} of {counted(length, 'token')}",
            expected="at least one window of two tokens",
            fix="add held-out text or use shorter windows (eval.lengths)",
        )
    if position_ids is None:
        position_ids = torch.arange(length).expand(rows, length)
    edges = bucket_edges(length)
    context = position_ids[:, 1:].contiguous()
    bucket = torch.bucketize(context, torch.tensor(edges[1:-1]), right=True)
    bucket = bucket.masked_fill(context == 0, -1)
    counts = torch.zeros(rows, len(edges) - 1, dtype=torch.long)
    for row in range(rows):
        for index, start, stop in _runs(bucket[row].tolist()):
            before, both = input_ids[row, start : start + 1], input_ids[row, start : stop + 1]
            counts[row, index] += _byte_len(tokenizer, both) - _byte_len(tokenizer, before)
    return Windows(input_ids, position_ids, edges, bucket, counts)


def _runs(buckets: list[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal stretches (bucket, start, stop) of equal bucket, unscored ones left out."""
    start = 0
    for i in range(1, len(buckets) + 1):
        if i == len(buckets) or buckets[i] != buckets[start]:
            if buckets[start] >= 0:
                yield buckets[start], start, i
            start = i


def _byte_len(tokenizer: "PreTrainedTokenizerBase", ids: Tensor) -> int:
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(str(text).encode())


@torch.no_grad()
def held_out_loss(
    model: "PreTrainedModel",
    windows: Windows,
    *,
    batch_tokens: int = 16384,
    bar: Bar | None = None,
    watch: Callable[[slice, Tensor, Head], None] | None = None,
    together: LongRows | None = None,
) -> HeldOutLoss:
    """Loss of a causal language model on windows.

    Args:
        model: in evaluation mode, on any device.
        windows: from `make_windows`.
        batch_tokens: tokens per forward pass, at least one window.
        bar: advanced by one per window.
        watch: called with the rows, the final hidden states [rows, T - 1, D] before each prediction, and the head.
        together: windows that several processes read together, each of which calls this.

    Raises:
        CheckpointError: the model's logits are not what its head says (unknown post-processing).
    """
    rows, length = windows.input_ids.shape
    _check_head(model, windows.input_ids[:1, :8])
    packed = bool((windows.position_ids[:, 1:] == 0).any())
    sums = torch.zeros(rows, len(windows.edges) - 1, dtype=torch.float64)
    counts = torch.zeros_like(sums, dtype=torch.long)
    size = max(1, batch_tokens // length)
    for first in range(0, rows, size):
        part = slice(first, first + size)
        ids, positions = windows.input_ids[part], windows.position_ids[part]
        if together is not None and together.take(length):
            hidden = together.hidden(model, ids, positions)[:, :-1]
        else:
            hidden = final_hidden(model, ids, positions if packed else None)
        head = Head.of(model)
        losses = _losses(hidden, head, windows.input_ids[part]).double().cpu()
        if watch is not None:
            watch(part, hidden, head)
        for index in range(sums.shape[1]):
            chosen = windows.bucket[part] == index
            sums[part, index] = torch.where(chosen, losses, 0.0).sum(1)
            counts[part, index] = chosen.sum(1)
        if bar is not None:
            bar.update(len(losses))
    return _summary(windows, sums, counts)


def _summary(windows: Windows, sums: Tensor, counts: Tensor) -> HeldOutLoss:
    def bits(nats: float, size: int) -> float:
        return nats / math.log(2) / size if size else math.nan

    buckets = []
    for i, (start, stop) in enumerate(zip(windows.edges, windows.edges[1:], strict=False)):
        if tokens := int(counts[:, i].sum()):
            total = float(sums[:, i].sum())
            error = ratio_standard_error(sums[:, i].tolist(), counts[:, i].tolist())
            size = int(windows.byte_counts[:, i].sum())
            buckets.append(PositionLoss(start, stop, tokens, total / tokens, error, bits(total, size)))
    by_window, window_counts = sums.sum(1).tolist(), counts.sum(1).tolist()
    total, tokens = sum(by_window), sum(window_counts)
    rows, length = windows.input_ids.shape
    return HeldOutLoss(
        length=length,
        windows=rows,
        tokens=tokens,
        loss=total / tokens,
        loss_se=ratio_standard_error(by_window, window_counts),
        bits_per_byte=bits(total, int(windows.byte_counts.sum())),
        buckets=tuple(buckets),
        window_sums=tuple(by_window),
        window_counts=tuple(window_counts),
    )


def final_hidden(model: "PreTrainedModel", input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """The hidden states that a model's head makes predictions of.

    Args:
        model: causal language model.
        input_ids: [R, T] token ids, on any device.
        position_ids: [R, T] positions that restart with each document, or None.

    Returns:
        [R, T - 1, D], the last token's left out.
    """
    from sse_convert.modeling.window.masks import packed_arguments  # which imports transformers

    positions: dict[str, Any] = {}
    if position_ids is not None:
        moved = position_ids.to(model.device)
        positions = {"position_ids": moved, **packed_arguments(model, moved)}
    out = backbone_of(model)(input_ids=input_ids.to(model.device), use_cache=False, **positions)
    hidden: Tensor = out.last_hidden_state[:, :-1]
    return hidden


def _losses(hidden: Tensor, head: Head, input_ids: Tensor) -> Tensor:
    flat, targets = hidden.flatten(0, 1), input_ids[:, 1:].flatten().to(hidden.device)
    parts = token_chunks(len(flat), head.weight.shape[0], flat.device)
    losses = [F.cross_entropy(head.logits(flat[part]), targets[part], reduction="none") for part in parts]
    return torch.cat(losses).view(hidden.shape[:2])


def _check_head(model: "PreTrainedModel", input_ids: Tensor) -> None:
    input_ids = input_ids.to(model.device)
    expected = model(input_ids=input_ids, use_cache=False).logits
    actual = Head.of(model).logits(backbone_of(model)(input_ids=input_ids, use_cache=False).last_hidden_state)
    if not torch.allclose(actual, expected.to(actual.dtype), rtol=1e-2, atol=1e-3):
        raise CheckpointError(
            f"{type(model).__name__} changes its logits in a way this evaluation does not know",
            expected="a linear head, optionally followed by logits_scaling or final_logit_softcapping",
        )
