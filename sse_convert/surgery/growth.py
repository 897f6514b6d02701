"""New partitions for one SSE layer, such that its output changes as little as possible: tensors in, tensors out.

A token writes and reads a partition with e_i = exp(z_i) / sum_j exp(z_j) over all N partitions, not renormalised over
the selected ones. Every new partition takes its share of that sum, and nothing else in the layer can give it back: the
feature map, the q/k norms and the output norm take no scale, values are common to the sparse and the shared partition,
and sse_out_scale multiplies both. So new logits must be small beside the old ones for every token, which rows of the
router alone cannot ensure; a bias can. With new rows copied from the old in turn and a bias -c on each,

    e'_i = e_i / (1 + exp(-c) * sum_j m_j e_j)          m_j: copies of partition j

which is e_i / (1 + r exp(-c)) for every token where each partition has r copies. What stays exact: the ranking of the
old partitions, and the choice at k = 1 and wherever the k-th best is within c of the best; the sparse part is scaled by
that factor once per gate (write, read): not at all where both are off or renormalised, and the output norm undoes it
(up to its epsilon) where there is no shared partition. Under the delta rule the write gate scales the write strength,
which changes states in another way, and the factor holds for the gates alone.

The larger c, the less changes, and the smaller the gradients that bring new partitions into use: with c = 6 they stayed
empty for as long as was tried (benchmarks/paper/growth.json), with the default of 2 they did not. A larger k adds
partitions that were not written or read before: the function itself changes.
"""

import dataclasses as dc
import math
from typing import Literal

import torch
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.initialise import ROUTER_STD
from sse_convert.modeling.tensors import ROUTER_BIAS, new_tensors

PER_PARTITION = ("sse_partition_q", "sse_partition_k", "sse_partition_v")
ROUTER, BIAS = "sse_router.weight", "sse_router.bias"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """How a state grows."""

    num_partitions: int | None = None
    """N afterwards; None keeps it"""
    top_k: int | None = None
    """k afterwards; None keeps it"""
    init: Literal["copy", "random"] = "copy"
    """new router rows: copies of the old ones in turn, or small and random"""
    shift: float = 2.0
    """c, taken from the logits of new partitions"""
    seed: int = 0
    """of random rows"""

    def __post_init__(self) -> None:
        if self.init not in ("copy", "random"):
            raise UsageError(f"init is {self.init!r}", expected="copy or random")
        if not (math.isfinite(self.shift) and self.shift >= 0):
            raise UsageError(f"shift is {self.shift}", expected="a finite number, 0 or more")

    def mixer(self, old: SSEMixer, where: str) -> SSEMixer:
        """The settings of a grown layer.

        Args:
            old: its settings.
            where: the layer, for messages.

        Raises:
            UsageError: something would shrink, nothing would grow, or the layer cannot grow.
        """
        partitions = old.num_partitions if self.num_partitions is None else self.num_partitions
        top_k = old.top_k if self.top_k is None else self.top_k
        for name, before, after in (("num_partitions", old.num_partitions, partitions), ("top_k", old.top_k, top_k)):
            if after < before:
                raise UsageError(f"{where}: {name} would shrink from {before} to {after}", expected=f"{before} or more")
        if (partitions, top_k) == (old.num_partitions, old.top_k):
            raise UsageError(
                f"{where} has {partitions} partitions and top_k {top_k} already",
                expected="a larger --num-partitions or --top-k",
            )
        grows = partitions > old.num_partitions
        if grows and old.router != "hidden":
            raise UsageError(
                f"{where}: router is {old.router!r}",
                expected="hidden, to add partitions",
                fix=f"convert the teacher anew, with num_partitions {partitions} in the recipe's mixer",
            )
        if grows and old.partition_gate != "softmax":
            raise UsageError(
                f"{where}: partition_gate is {old.partition_gate!r}", expected="softmax, to add partitions"
            )
        if grows and old.num_partitions == 1 and self.init == "copy":
            raise UsageError(
                f"{where} has one partition and so no router to copy", expected="init random", fix="--init random"
            )
        bias = old.router_bias or (grows and self.shift > 0)
        try:
            return dc.replace(old, num_partitions=partitions, top_k=top_k, router_bias=bias)
        except ValueError as error:
            raise UsageError(f"{where}: {error}", expected="settings that fit each other") from error


def grown_tensors(
    tensors: dict[str, Tensor], old: SSEMixer, new: SSEMixer, dims: AttentionDims, growth: Growth, layer: int
) -> dict[str, Tensor]:
    """The tensors of one layer that change or are added; float32 or wider, by name below the attention module.

    Args:
        tensors: the layer's new tensors, as stored.
        old: settings before.
        new: settings after.
        dims: attention sizes.
        growth: how.
        layer: index, which with the seed fixes random rows.
    """
    before, after = old.num_partitions, new.num_partitions
    if after == before:
        return {}
    parents = torch.arange(after - before) % before
    wide = {name: tensor if tensor.dtype == torch.float64 else tensor.float() for name, tensor in tensors.items()}
    rows_NC = wide.get(ROUTER, torch.zeros(1, dims.hidden))
    if growth.init == "copy":
        added = rows_NC[parents]
    else:
        generator = torch.Generator().manual_seed(growth.seed * 1_000_003 + layer)
        added = ROUTER_STD * torch.randn(len(parents), dims.hidden, generator=generator).to(rows_NC)
    grown = {ROUTER: torch.cat([rows_NC, added])}
    if new.router_bias:
        bias_N = wide.get(BIAS, torch.zeros(before))
        own = bias_N[parents] if growth.init == "copy" else torch.zeros(len(parents))
        grown[BIAS] = torch.cat([bias_N, own.to(bias_N) - growth.shift])
    if ROUTER_BIAS in wide or (new.balance == "bias" and before == 1):
        share = kept_share(old, new, growth) or 1.0
        selection_N = share * wide.get(ROUTER_BIAS, torch.zeros(before))  # as e is scaled, so that e + b ranks alike
        lowest = selection_N.min() - 1  # e is at most 1: no new partition overtakes an old one
        grown[ROUTER_BIAS] = torch.cat([selection_N, lowest.expand(len(parents))])
    for name in PER_PARTITION:
        if name in wide:
            offsets = wide[name][parents]
            grown[name] = torch.cat([wide[name], offsets if growth.init == "copy" else torch.zeros_like(offsets)])
    shapes = {spec.name: spec.shape for spec in new_tensors(dims, new)}
    assert all(tuple(tensor.shape) == shapes[name] for name, tensor in grown.items()), "grown tensors fit the settings"
    return grown


def kept_share(old: SSEMixer, new: SSEMixer, growth: Growth) -> float | None:
    """The least share of its gate e that an old partition keeps; None where random rows leave it open."""
    copies = -(-(new.num_partitions - old.num_partitions) // old.num_partitions)
    if copies == 0:
        return 1.0
    return 1 / (1 + copies * math.exp(-growth.shift)) if growth.init == "copy" else None
