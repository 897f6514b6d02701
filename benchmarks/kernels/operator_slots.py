"""Linear attention of other libraries on as many slots as SSE has: one per token for the shared partition, K for the
others. Each copy of the tokens is attended to by itself, as a partition is by its own.

They get what they take: keys that are mapped, log decays in float32, a state for each query head. So they neither route
nor gather nor map, and where two query heads share a state here they have two. R = T (K + 1) slots, H = query heads.
"""

import dataclasses as dc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.operator_cases import FLASH_QLA, GDN_SLOTS, GLA_SLOTS, KDA_SLOTS
from benchmarks.kernels.operator_inputs import Inputs
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.feature_maps import key_feature_map

Leaves = dict[str, Tensor]
Library = Callable[..., tuple[Tensor, Tensor | None]]
SHARED = {"q": "shared q", "k": "shared k", "v": "v", "log_decay": "shared log_decay"}


@dc.dataclass(frozen=True)
class Slots:
    """What a library differentiates, [R, H, ...] each, and what it is asked."""

    leaves: Leaves
    """q, k, v, log_decay ([R, H] for one decay per head), and write_strength [R, H] for the delta rule"""
    d_o: Tensor
    cu_seqlens: Tensor
    attend: Library

    def run(self) -> Tensor:
        """o [R, H, V]."""
        q, k, v, log_decay, *strength = (x[None] for x in self.leaves.values())
        beta = {"beta": strength[0]} if strength else {}
        return self.attend(q, k, v, g=log_decay, **beta, cu_seqlens=self.cu_seqlens)[0][0]

    def exact(self, t: Leaves) -> Tensor:
        """The same on leaves like these, of a part of the heads, by SSE with one partition and without gates."""
        decay, logits = t["log_decay"], t["q"].new_zeros(len(t["q"]), 1)
        decay = decay if decay.dim() == 3 else decay[..., None].expand_as(t["k"])
        return sse_attention(
            t["q"], t["k"], t["v"], decay, logits, top_k=1, write_gate=False, read_gate=False,
            cu_seqlens=self.cu_seqlens, backend="varlen", write_strength=t.get("write_strength"),
        )[0]  # fmt: skip


def slots(candidate: str, x: Inputs) -> Slots:
    """A library's inputs from those of SSE."""
    case, copies = x.case, x.case.top_k + 1
    leaves = {name: torch.cat([_each(x, of_shared), *[_each(x, name)] * (copies - 1)])
              for name, of_shared in SHARED.items()}  # fmt: skip
    if case.delta:
        leaves["write_strength"] = torch.cat([_each(x, "write_strength")] * copies)
    if candidate in (GDN_SLOTS, FLASH_QLA):
        leaves["log_decay"] = leaves["log_decay"].mean(-1)
    own = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    starts = [x.cu_seqlens[1:] + copy * case.tokens for copy in range(copies)]
    cu_seqlens = torch.cat([x.cu_seqlens[:1], *starts])
    return Slots(own, torch.cat([x.d_o] * copies), cu_seqlens, library(candidate))


def _each(x: Inputs, name: str) -> Tensor:
    """A leaf of the inputs for each query head, as the libraries take it."""
    leaf = as_taken(x, name).detach()
    return leaf.repeat_interleave(x.case.query_heads // leaf.shape[1], dim=1)


def as_taken(x: Inputs, name: str) -> Tensor:
    """A leaf as the libraries take it: keys mapped, and log decays in float32."""
    leaf, case = x.leaves[name], x.case
    if name in ("k", "shared k"):
        return key_feature_map(leaf.float(), case.k_map).to(leaf.dtype)
    if name in ("log_decay", "shared log_decay") and case.normalizer is not None:
        return F.logsigmoid(leaf.float()) / case.normalizer
    return leaf


def library(candidate: str) -> Library:
    """The function of a library; fla-core's own kernels, also where FlashQLA could take their place."""
    os.environ["FLA_FLASH_QLA"] = "0"
    found: Any
    if candidate == FLASH_QLA:
        from flash_qla import chunk_gated_delta_rule as found
    elif candidate == GDN_SLOTS:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as found
    elif candidate == KDA_SLOTS:
        from fla.ops.kda import chunk_kda as found
    else:
        assert candidate == GLA_SLOTS, candidate
        from fla.ops.gla import chunk_gla as found
    return found
