"""Windows of text that several processes read together, as a stage with `context_parallel` trains on them.

Each process holds a whole model and a part of the tokens; all of them get the hidden states of all tokens. What is no
such window the first process does alone.
"""

import dataclasses as dc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sse_convert.modeling.architectures import backbone_of
from sse_convert.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def splits_rows(recipe: Recipe) -> bool:
    """Whether a stage of a recipe has its rows on several processes, as evaluation then does."""
    return any(stage.context_parallel > 1 for stage in recipe.stages)


@dc.dataclass(frozen=True, slots=True)
class LongRows:
    """Which windows are read together, and by whom."""

    length: int
    """tokens of the shortest"""
    size: int
    """processes that read one"""
    group: Any
    """their process group"""

    @staticmethod
    def of(recipe: Recipe) -> "LongRows | None":
        """Those of a recipe, from the rows of its split stages on; None if it has none, or there is one process.

        Every process must call it.
        """
        if not splits_rows(recipe) or not (dist.is_available() and dist.is_initialized()):
            return None
        size = max(stage.context_parallel for stage in recipe.stages)
        group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
        return LongRows(min(stage.seq_len for stage in recipe.stages if stage.context_parallel > 1), size, group)

    def take(self, length: int) -> bool:
        """Whether windows of this length are read together."""
        return length >= self.length and length % self.size == 0

    def hidden(self, model: "PreTrainedModel", input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Final hidden states [R, T, D], of all tokens on every process; without gradients.

        Args:
            model: whole on each process.
            input_ids: [R, T], the same on each process.
            position_ids: [R, T] on the CPU, restarting with each document.
        """
        from sse_convert.modeling.context import CONTEXT_ATTENTION, Shard, sharded

        shard = Shard.of(self.group, position_ids, model.device)
        config, ids = model.config, shard.own(input_ids).to(model.device)
        before, config._attn_implementation = config._attn_implementation, CONTEXT_ATTENTION
        try:
            with sharded(shard), torch.no_grad():
                found = backbone_of(model)(input_ids=ids, position_ids=shard.own(shard.positions), use_cache=False)
                whole = shard.whole(found.last_hidden_state.flatten(0, 1)).view(*shard.shape, -1)
        finally:
            config._attn_implementation = before
        return whole


def meet_others(recipe: Recipe) -> bool:
    """Meet the other processes that were launched, if there are any.

    Returns:
        Whether this is the process that writes and says what was found.

    Raises:
        HardwareError: a parallel mode that is not offered.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from sse_convert.training.setup import make_accelerator

    return bool(make_accelerator(recipe.train).is_main_process)


def found_by_all(recipe: Recipe, main: bool, measure: Callable[[], T]) -> T:
    """What every process measures where rows are split, and else the first one for all.

    Args:
        recipe: whether it splits rows.
        main: whether this is the first process.
        measure: makes it; plain data that can be sent.
    """
    if splits_rows(recipe) or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return measure()
    from accelerate.utils import broadcast_object_list

    found = [measure() if main else None]
    broadcast_object_list(found)
    (result,) = found
    assert result is not None, "the first process sends what it found"
    return result
