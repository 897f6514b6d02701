"""Sampling whose random numbers belong to a row, whatever rows stand beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from sse_convert.inference.sampling import Sampling


class SeededChoice(LogitsProcessor):
    """Leaves one token of each row, drawn with random numbers that belong to the row.

    Args:
        sampling: with a temperature above 0.
        seeds: one per row.
        start: columns of the prompts.
        device: of the logits.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], start: int, device: torch.device) -> None:
        self._warpers = [TemperatureLogitsWarper(sampling.temperature)]
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        draws = [_uniform(seed, sampling.max_new_tokens) for seed in seeds]
        self._draws = torch.stack(draws).to(device)
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B, vocab] with all but one of each row at minus infinity: a draw from the distribution by its CDF."""
        for warp in self._warpers:
            scores = warp(input_ids, scores)
        shares = torch.softmax(scores.double(), -1).cumsum(-1)
        draw = self._draws[:, input_ids.shape[1] - self._start, None] * shares[:, -1:]
        chosen = torch.searchsorted(shares, draw, right=True).clamp_max(shares.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _uniform(seed: int, count: int) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
