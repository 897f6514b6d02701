"""Changes of training that no recipe key makes, each for one stage at a time."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sse_convert.modeling.head import Head
from sse_convert.recipe.schema import Stage
from sse_convert.training import loop, losses
from sse_convert.training import stage as training
from sse_convert.training.losses import ChunkLoss
from sse_convert.training.objective import Objective
from sse_convert.training.schedule import Schedule

AVERAGED = 0.2
"""share of a stage's steps, its last ones, whose weights are averaged"""
EARLY, LATE = 0.5, 1.5
"""weights of the first and the last token of a row"""


@contextlib.contextmanager
def unchanged(stage: Stage) -> Iterator[None]:
    """Nothing is changed."""
    yield


@contextlib.contextmanager
def late_positions_count_more(stage: Stage) -> Iterator[None]:
    """The gradient of a token's divergence grows with its place in the row, by `EARLY` to `LATE`; losses that are
    reported do not.

    Args:
        stage: of loss kl over whole rows.
    """
    own = losses.summed

    def weighted(hidden: Tensor, head: Head, chunk_loss: ChunkLoss) -> Tensor:
        if hidden.requires_grad and isinstance(chunk_loss, losses._Divergence | losses._FusedDivergence):
            chunk_loss = _ByPosition(chunk_loss, position_weights(len(hidden), stage.seq_len, hidden.device))
        return own(hidden, head, chunk_loss)

    with mock.patch.object(losses, "summed", weighted):
        yield


def position_weights(tokens: int, length: int, device: torch.device) -> Tensor:
    """Weights [tokens, 1] of rows of a length, one behind the other; 1 on average."""
    place = torch.arange(tokens, device=device) % length
    return (EARLY + (LATE - EARLY) * place / (length - 1))[:, None]


class _ByPosition:
    """A loss of chunks whose gradients are weighted by token."""

    def __init__(self, chunk_loss: ChunkLoss, weights: Tensor) -> None:
        self._own, self._weights = chunk_loss, weights
        self.logit_bytes = chunk_loss.logit_bytes

    def __call__(self, part: slice, x: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        loss, grad = self._own(part, x, head)
        return loss, grad * self._weights[part].to(grad.dtype)


class Average:
    """The mean of trained weights over the last steps of a stage."""

    def __init__(self, steps: int) -> None:
        self._from, self._step, self.count = steps - max(1, round(AVERAGED * steps)), 0, 0
        self._means: dict[str, Tensor] = {}

    def add(self, objective: Objective) -> None:
        """Take the weights of a step in, if it is one of the last."""
        self._step += 1
        if self._step <= self._from:
            return
        self.count += 1
        for name, weight in _trained(objective):
            mean = self._means.setdefault(name, torch.zeros_like(weight))
            mean += (weight - mean) / self.count

    def put(self, objective: Objective) -> None:
        """Give the model the means."""
        for name, weight in _trained(objective):
            weight.copy_(self._means[name])


def _trained(objective: Objective) -> Iterator[tuple[str, Tensor]]:
    for i, part in enumerate(objective.parts):
        for name, weight in part.module.named_parameters():
            if weight.requires_grad:
                yield f"{i}.{name}", weight.detach()


@contextlib.contextmanager
def last_weights_averaged(stage: Stage) -> Iterator[None]:
    """What a stage writes are means over its last steps. One that is continued averages from there on.

    Args:
        stage: in one process.
    """
    average, update, write = Average(Schedule.of(stage).steps), loop._update, training._StageRun.write

    def updated(objective: Objective, clip: float, loss: float) -> tuple[float, bool]:
        found = update(objective, clip, loss)
        average.add(objective)
        return found

    def written(run: Any, objective: Objective, report: Any) -> None:
        average.put(objective)
        write(run, objective, report)

    with mock.patch.object(loop, "_update", updated), mock.patch.object(training._StageRun, "write", written):
        yield
