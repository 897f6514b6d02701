"""Three linear attentions that differ in how keys and decays go together, each with dense or row-sparse updates.

Every one maps [R, B, T, W] to the same, and also returns the keys [R, B, T, H, D] by which rows were selected.
"""

from abc import abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.row_sparse.layers import NORM_EPS, Linear, RMSNorm
from benchmarks.paper.row_sparse.operators import gated_linear_attention, gated_slot_attention
from benchmarks.paper.row_sparse.update import Updates, apply_updates
from sse_convert.kernels.feature_maps import KeyFeatureMap

MixerName = Literal["gla", "gla_softmax", "metala", "gsa"]
GLA_NORMALIZER, METALA_NORMALIZER, GSA_NORMALIZER = 16.0, 16.0, 8.0
"""decay = sigmoid(logit) ** (1 / this), as published"""
DECAY_RANK = 16


class RowSparseMixer(nn.Module):
    """What the three share.

    Args:
        width: W; each head has W / H state rows, and values as wide.
        heads: H.
        updates: one per model.
    """

    def __init__(self, width: int, heads: int, updates: Updates) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.updates = updates

    @abstractmethod
    def forward(self, x_RBTW: Tensor) -> tuple[Tensor, Tensor]:
        """Output [R, B, T, W], and keys [R, B, T, H, D] before the map and the selection."""

    def split(self, x_RBTW: Tensor) -> Tensor:
        """[R, B, T, H * dim] as [R, B, T, H, dim]."""
        return torch.unflatten(x_RBTW, -1, (self.heads, -1))


class GLA(RowSparseMixer):
    """Gated linear attention: keys and decays are projections of their own.

    With `k_map` softmax, a row-sparse update is the paper's own: k = softmax(top-k(x W_k)).

    Source: arXiv:2312.06635.
    """

    def __init__(self, width: int, heads: int, updates: Updates, k_map: KeyFeatureMap = "identity") -> None:
        super().__init__(width, heads, updates)
        runs = len(updates)
        self.k_map: KeyFeatureMap = k_map
        self.qkv = Linear(runs, width, 3 * width)
        self.decay_down = Linear(runs, width, DECAY_RANK)
        self.decay_up = Linear(runs, DECAY_RANK, width, bias=True)
        self.gate = Linear(runs, width, width)
        self.norm = RMSNorm(runs, self.head_dim)
        self.out = Linear(runs, width, width)

    def forward(self, x_RBTW: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        q, keys, v = (self.split(y) for y in self.qkv(x_RBTW).chunk(3, -1))
        log_decay = F.logsigmoid(self.split(self.decay_up(self.decay_down(x_RBTW)))) / GLA_NORMALIZER
        k, log_decay = apply_updates(keys, log_decay, self.updates, self.k_map)
        o = gated_linear_attention(q * self.head_dim**-0.5, k, v, log_decay)
        return self.out(self.norm(o).flatten(-2) * F.silu(self.gate(x_RBTW))), keys


class MetaLA(RowSparseMixer):
    """Meta linear attention: no keys of its own; what a token writes to a row is what the row forgets, k = 1 - a.

    Source: arXiv:2411.10741, self-augmentation and norm as in the authors' released code.
    """

    def __init__(self, width: int, heads: int, updates: Updates) -> None:
        super().__init__(width, heads, updates)
        runs = len(updates)
        self.q_decay_v = Linear(runs, width, 3 * width)
        self.augmentation = nn.Parameter(torch.zeros(runs, 1, 1, heads, self.head_dim))
        self.gate = Linear(runs, width, width, bias=True)
        self.out = Linear(runs, width, width)

    def forward(self, x_RBTW: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        q, logits, v = (self.split(y) for y in self.q_decay_v(x_RBTW).chunk(3, -1))
        log_decay = F.logsigmoid(logits) / METALA_NORMALIZER
        keys = -torch.expm1(log_decay)
        k, log_decay = apply_updates(keys, log_decay, self.updates)
        own = (q * self.augmentation * k).sum(-1, keepdim=True)
        o = gated_linear_attention(q, k, v, log_decay) + torch.sigmoid(own * v)
        o = F.layer_norm(o, o.shape[-1:], eps=NORM_EPS)
        return self.out(o.flatten(-2) * F.silu(self.gate(x_RBTW))), keys


class GSA(RowSparseMixer):
    """Gated slot attention: two passes with softmax over the slots between them; write strength 1 - a, rows are slots.

    Source: arXiv:2409.07146.
    """

    def __init__(self, width: int, heads: int, updates: Updates) -> None:
        super().__init__(width, heads, updates)
        runs = len(updates)
        self.qkv = Linear(runs, width, 3 * width)
        self.decay = Linear(runs, width, width)
        self.norm = RMSNorm(runs, width)
        self.out = Linear(runs, width, width)

    def forward(self, x_RBTW: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        q, k, v = (self.split(y) for y in F.silu(self.qkv(x_RBTW)).chunk(3, -1))
        log_decay = F.logsigmoid(self.split(self.decay(x_RBTW))) / GSA_NORMALIZER
        strengths = -torch.expm1(log_decay)
        write, log_decay = apply_updates(strengths, log_decay, self.updates)
        o = gated_slot_attention(q, k, v, write, log_decay)
        return self.out(self.norm(F.silu(o).flatten(-2))), strengths


def build_mixer(name: MixerName, width: int, heads: int, updates: Updates) -> RowSparseMixer:
    """The mixer of that name; `gla_softmax` is GLA with the softmax map."""
    if name == "metala":
        return MetaLA(width, heads, updates)
    if name == "gsa":
        return GSA(width, heads, updates)
    return GLA(width, heads, updates, "softmax" if name == "gla_softmax" else "identity")
