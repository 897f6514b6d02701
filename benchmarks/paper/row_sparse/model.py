"""The model of Figure mqa_topk: two layers of token mixer and channel mixer, two heads; R of them at once."""

import dataclasses as dc
from typing import get_args

import torch
from torch import Tensor, nn

from benchmarks.paper.row_sparse.layers import ChannelMixer, RMSNorm, ShortConvolution
from benchmarks.paper.row_sparse.mixers import MixerName, build_mixer
from benchmarks.paper.row_sparse.update import Updates, row_balance_loss
from sse_convert.errors import UsageError


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The shape that R models have in common."""

    mixer: MixerName
    """token mixer"""
    width: int
    """model dimension, a multiple of `heads`"""
    vocab_size: int
    """tokens, in and out; the embedding is tied to the head"""
    layers: int = 2
    """token mixers, each followed by a channel mixer"""
    heads: int = 2
    """heads of a token mixer"""
    convolution: int = 4
    """tokens of the causal convolution in front of every token mixer (MetaLA's own), 0 for none"""

    def __post_init__(self) -> None:
        if self.mixer not in get_args(MixerName):
            raise UsageError(f"mixer is {self.mixer!r}", expected=f"one of {', '.join(get_args(MixerName))}")
        if self.width < 1 or self.width % self.heads:
            raise UsageError(f"width {self.width} with {self.heads} heads", expected=f"a multiple of {self.heads}")

    @property
    def rows(self) -> int:
        """State rows of a head."""
        return self.width // self.heads

    @property
    def state_size(self) -> int:
        """Numbers in the state of one sequence, all layers: one matrix per head, two for gsa."""
        return self.layers * self.heads * self.rows**2 * (2 if self.mixer == "gsa" else 1)


class RecallModel(nn.Module):
    """R causal language models of one shape, without positions.

    Args:
        settings: the shape.
        updates: one per model.
    """

    def __init__(self, settings: ModelSettings, updates: Updates) -> None:
        super().__init__()
        runs, width = len(updates), settings.width
        self.updates = updates
        self.embedding = nn.Parameter(torch.randn(runs, settings.vocab_size, width) * width**-0.5)
        self.blocks = nn.ModuleList(Block(settings, updates) for _ in range(settings.layers))
        self.norm = RMSNorm(runs, width)

    def forward(self, inputs_RBT: Tensor, positions_RBK: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits at the asked positions alone.

        Args:
            inputs_RBT: int64 token ids.
            positions_RBK: int64, where a prediction is wanted.

        Returns:
            Logits [R, B, K, vocabulary], and of each layer the keys [R, B, T, H, D] that select rows.
        """
        x_RBTW = self._embed(inputs_RBT)
        keys = []
        for block in self.blocks:
            x_RBTW, own = block(x_RBTW)
            keys.append(own)
        asked_RBKW = x_RBTW.gather(2, positions_RBK[..., None].expand(-1, -1, -1, x_RBTW.shape[-1]))
        logits = torch.bmm(self.norm(asked_RBKW).flatten(1, 2), self.embedding.mT)
        return torch.unflatten(logits, 1, positions_RBK.shape[1:]), keys

    def balance_loss(self, keys: list[Tensor]) -> Tensor:
        """Row balance loss [R] of the keys of a forward, mean over layers."""
        return torch.stack([row_balance_loss(own, self.updates) for own in keys]).mean(0)

    def _embed(self, inputs_RBT: Tensor) -> Tensor:
        """Rows of each model's own table; the gradient of a token that is everywhere (the filler) costs no more."""
        runs, vocab_size, _ = self.embedding.shape
        first_R11 = torch.arange(0, runs * vocab_size, vocab_size, device=inputs_RBT.device)[:, None, None]
        rows = self.embedding.flatten(0, 1).index_select(0, (inputs_RBT + first_R11).flatten())
        return torch.unflatten(rows, 0, inputs_RBT.shape)


class Block(nn.Module):
    """x + mixer(convolution(norm(x))), then x + channels(norm(x))."""

    def __init__(self, settings: ModelSettings, updates: Updates) -> None:
        super().__init__()
        runs, width, size = len(updates), settings.width, settings.convolution
        self.mixer_norm = RMSNorm(runs, width)
        self.convolution = ShortConvolution(runs, width, size) if size else nn.Identity()
        self.mixer = build_mixer(settings.mixer, width, settings.heads, updates)
        self.channel_norm = RMSNorm(runs, width)
        self.channels = ChannelMixer(runs, width)

    def forward(self, x_RBTW: Tensor) -> tuple[Tensor, Tensor]:
        """[R, B, T, W] to the same, and the mixer's keys."""
        mixed, keys = self.mixer(self.convolution(self.mixer_norm(x_RBTW)))
        x_RBTW = x_RBTW + mixed
        return x_RBTW + self.channels(self.channel_norm(x_RBTW)), keys
