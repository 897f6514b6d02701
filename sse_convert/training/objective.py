"""What the loop asks of a loss, and what the three losses share.

Every number a loss reports is already divided by the tokens (or layers) of the whole step, so the sum over micro
batches and processes is the step's mean, exactly.
"""

import contextlib
import dataclasses as dc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import Tensor, nn

from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.context import Shard, sharded
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.head import Head
from sse_convert.modeling.layout import LAYOUT, SequenceLayout, document_starts, sequence_layout
from sse_convert.modeling.window.masks import packed_arguments
from sse_convert.training.context import ROW_POSITIONS
from sse_convert.training.sharding import is_sharded, share_out

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import PreTrainedModel

Batch = Mapping[str, Tensor]


def whole(value: Tensor) -> Tensor:
    """A plain tensor from one that may be sharded."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


@dc.dataclass(frozen=True, slots=True)
class Part:
    """A module with an optimizer of its own, as Accelerate prepared them."""

    name: str
    """key in training checkpoints"""
    module: nn.Module
    """prepared module"""
    optimizer: "AcceleratedOptimizer"
    """prepared optimizer"""
    rates: list[float]
    """peak learning rate of each group"""


class Objective(ABC):
    """A loss, the models it needs and the parameters it trains."""

    parts: list[Part]
    """what is trained"""
    student: "PreTrainedModel"
    """the converted model, as far as it is not sharded"""
    judged = "valid_loss"
    """the figure of `held_out_means` that says which weights are best"""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def add_gradients(self, loss: Tensor) -> None:
        """Backward of a contribution to the step's mean."""
        self.accelerator.backward(loss * self.accelerator.num_processes)  # wrappers average over the processes

    def on_device(self, batch: Batch) -> Batch:
        """A micro batch on this process's device, as `backward` takes it."""
        device = self.accelerator.device
        return {
            name: value if name == ROW_POSITIONS else value.to(device, non_blocking=True)
            for name, value in batch.items()
        }

    @contextlib.contextmanager
    def split(self, batch: Batch) -> Iterator[Batch]:
        """Where rows are split over processes, let models know; gives the batch without what says so."""
        if ROW_POSITIONS not in batch:
            yield batch
            return
        group = self.accelerator.torch_device_mesh["cp"].get_group()
        own = {name: value for name, value in batch.items() if name != ROW_POSITIONS}
        with sharded(Shard.of(group, batch[ROW_POSITIONS], self.accelerator.device)):
            yield own

    def count(self, batch: Batch) -> int:
        """Tokens of a micro batch that the loss is averaged over: all, unless an objective says otherwise."""
        return batch["input_ids"].numel()

    @abstractmethod
    def backward(self, batch: Batch, *, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        """Forward and backward of one micro batch.

        Args:
            batch: from `on_device`.
            weight: 1 / tokens that count in the whole step.
            share: this micro batch's part of the whole step, for losses that are means by themselves.
            last: the step's last micro batch of this process, after which gradients must be reduced.

        Returns:
            Detached 0-d contributions to the step's means; `loss` among them.
        """

    @abstractmethod
    def held_out(self, batch: Batch) -> dict[str, Tensor]:
        """What `held_out_means` needs of a micro batch from `on_device`: 0-d sums over what its targets predict.

        Models are in evaluation mode, and there are no gradients.
        """

    @abstractmethod
    def held_out_means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`valid_loss`, and `valid_kl` where the teacher is there, from the sums over all rows and processes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The whole student on the CPU, named as in its checkpoint; on the main process only, the others get {}.

        Every process must call it.
        """

    def close(self) -> None:
        """Free what only training needs: the graph of a pass that failed holds all its activations."""
        student: Any = self.student
        for layer in student.sse_layers().values():
            layer.trace.forget()

    def curve(self, records: list[dict[str, Any]]) -> list[float]:
        """The loss of each step, from the step records; those that were not finite are left out."""
        return [record["loss"] for record in records if record["loss"] is not None]

    def memory(self) -> dict[str, Any]:
        """JSON-ready data that a resumed stage needs beside weights and optimizer."""
        return {}

    def details(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """What the stage's report says beside the loss, from the step records."""
        return {}

    def accumulating(self, part: Part, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Leave out the reduction of gradients before the last micro batch, where that saves anything.

        FSDP reduces every time: it would have to keep whole gradients otherwise.
        """
        if last or is_sharded(self.accelerator):
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.accelerator.no_sync(part.module)
        return context


class Frozen(nn.Module):
    """A teacher behind one forward, which is where a sharded model gathers its weights."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        offsets: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Head]:
        """Final hidden states [B, T, D], and the head as long as the weights are gathered.

        Args:
            input_ids: [B, T].
            position_ids: [B, T] if documents begin within rows.
            offsets: of those documents, if they are known (see `layer_arguments.OFFSETS`).
            attention_mask: [B, T], 0 in the padding; None where there is none.
        """
        backbone, config = backbone_of(self.model), self.model.config
        more: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        if config._attn_implementation == DOCUMENT_ATTENTION:
            more[LAYOUT] = _layout(input_ids, position_ids, offsets)
        elif position_ids is not None:
            more |= packed_arguments(self.model, position_ids)
        hidden = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more)
        return hidden.last_hidden_state, Head.of(self.model)


def _layout(input_ids: Tensor, position_ids: Tensor | None, offsets: Tensor | None) -> SequenceLayout:
    batch, length = input_ids.shape
    starts = document_starts(position_ids, batch, look=offsets is None)
    return sequence_layout((batch, length), input_ids.device, starts=starts, offsets=offsets)


def frozen_teacher(model: "PreTrainedModel", accelerator: Accelerator, layers: nn.ModuleList) -> Frozen:
    """A teacher ready for use; under FSDP sharded like the student, layer by layer."""
    teacher = Frozen(model)
    share_out([*layers, teacher], accelerator, trained=False)
    return teacher


class Calls:
    """Remembers the last call of chosen modules: arguments and output. Hooks are objects, so models can be pickled."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.last: dict[int, Call] = {}
        self._handles = [
            module.register_forward_hook(_Recorder(self.last, index), with_kwargs=True)
            for index, module in modules.items()
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class Call:
    """Arguments and output of one call. Not a tuple or dataclass: data-parallel wrappers must pass it on untouched."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        self.args = args
        self.kwargs = kwargs
        self.output = output


class _Recorder:
    def __init__(self, last: dict[int, Call], index: int) -> None:
        self._last = last
        self._index = index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._last[self._index] = Call(args, kwargs, output[0] if isinstance(output, tuple) else output)
