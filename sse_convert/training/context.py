"""Context parallelism of a stage: which process has which rows, and which of their tokens.

Processes are laid out on Accelerate's own device mesh, neighbours holding the same rows; the model is sharded over all
of them (FSDP2). Accelerate's context for attention is never entered: it deals tokens out in another order, which
recurrent states cannot follow.
"""

import dataclasses as dc

from accelerate import Accelerator, ParallelismConfig
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.errors import HardwareError, RecipeError, TrainingError
from sse_convert.modeling.attention_dims import document_attention_problem
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.context import CONTEXT_ATTENTION, split_problems
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.sink_attention import SINK_ATTENTION
from sse_convert.recipe.schema import Stage
from sse_convert.training.sharding import is_sharded

ROW_POSITIONS = "row_positions"
"""key of a batch: int64 [R, T], positions of whole rows, where the batch has this process's tokens of them"""


@dc.dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands."""

    rank: int
    """which rows it has, from 0 to `ranks` - 1"""
    ranks: int
    """parts into which the rows of a step are dealt out"""
    part: int
    """which tokens of its rows it has, from 0 to `parts` - 1"""
    parts: int
    """processes that have the same rows"""

    @staticmethod
    def of(accelerator: Accelerator, parts: int) -> "Place":
        """The place of this process when `parts` processes hold the same rows."""
        rank, part = divmod(accelerator.process_index, parts)
        return Place(rank, accelerator.num_processes // parts, part, parts)

    def cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's tokens [R, T / parts] of a batch [R, T], and the positions of the whole rows."""
        if self.parts == 1:
            return batch
        own = {name: value.chunk(self.parts, 1)[self.part].contiguous() for name, value in batch.items()}
        return {**own, ROW_POSITIONS: batch["position_ids"]}


def lay_out(accelerator: Accelerator, stage: Stage) -> Place:
    """Give Accelerate the device mesh of a stage, and say where this process stands in it.

    Raises:
        TrainingError: processes cannot be put together so.
        HardwareError: the processes do not shard the model.
    """
    parts, processes = stage.context_parallel, accelerator.num_processes
    if parts > 1 and processes % parts:
        raise TrainingError(
            f"stage {stage.name}: context_parallel is {parts}, for {processes} process{'es' * (processes > 1)}",
            expected=f"a multiple of {parts} processes",
            fix=f"launch {-(-processes // parts) * parts} processes, or set context_parallel to a divisor of "
            f"{processes}",
        )
    if parts > 1 and not is_sharded(accelerator):
        raise HardwareError(
            f"stage {stage.name}: context_parallel is {parts} under {accelerator.distributed_type.value}",
            expected="FSDP version 2, which shards the model over the same processes",
            fix="launch with --use_fsdp --fsdp_version 2",
        )
    before = accelerator.parallelism_config
    if parts != (before.cp_size if before else 1):
        plan = ParallelismConfig(dp_shard_size=processes // parts, cp_size=parts)
        accelerator.state.parallelism_config = plan
        accelerator.state.device_mesh = plan.get_device_mesh(accelerator.device.type)
    return Place.of(accelerator, parts)


def choose_attention(model: PreTrainedModel, stage: Stage) -> PreTrainedModel:
    """Let a model's softmax layers attend over the processes that hold the same rows, or else within documents, without
    masks of all pairs of tokens. Families that this is not built for keep their attention.

    Args:
        model: student or teacher.
        stage: of the model.

    Raises:
        RecipeError: the model's heads or layers cannot be dealt out.
    """
    config = model.config
    if stage.context_parallel > 1:
        mixers = layer_mixers(config) if hasattr(config, "sse") else ()
        if problems := split_problems(config, stage.context_parallel, mixers):
            raise RecipeError(
                f"stage {stage.name}: {'; '.join(problems)}",
                expected="a number that divides the heads, and plain softmax attention beside converted layers",
                fix="set context_parallel: 1, or another number",
            )
        config._attn_implementation = CONTEXT_ATTENTION
        return model
    if config._attn_implementation in ("sdpa", SINK_ATTENTION) and document_attention_problem(config) is None:
        config._attn_implementation = DOCUMENT_ATTENTION
    return model
