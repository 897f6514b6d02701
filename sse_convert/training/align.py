"""`layer_mse`: every converted layer learns to give its teacher layer's output, from its teacher layer's input.

The teacher runs once; what flows on is the teacher's output, so layers do not depend on each other. Each has its own
optimizer and its own backward, and only one layer's activations are alive at a time.

Source: attention transfer as in RADLADS (arXiv:2505.03005), stage 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.console import progress
from sse_convert.data.packing import IGNORED
from sse_convert.mixers import WindowMixer
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.context import current_shard
from sse_convert.modeling.layer_arguments import split_arguments
from sse_convert.modeling.layout import LAYOUT, document_starts, sequence_layout
from sse_convert.modeling.window.sliding import MASKS, attention_mask_for, mask_key, training_sees
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import full_state
from sse_convert.training.layer_error import LayerError, error_sums
from sse_convert.training.objective import Batch, Call, Calls, Objective, Part, frozen_teacher
from sse_convert.training.optimizer import make_optimizer
from sse_convert.training.setup import converted_attention, decoder_layers
from sse_convert.training.sharding import prepared, receive, share_out


class Align(Objective):
    """Alignment of all converted layers, which share no parameter, no optimizer and no gradient norm.

    Args:
        accelerator: of the stage.
        student: the converted model.
        teacher: the original model.
        stage: settings.
        first: this process's micro batches of the first step, which measure how far each layer is off at the start.
        memory: what an interrupted run remembered; replaces the measurement.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        stage: Stage,
        *,
        first: Sequence[Batch],
        memory: dict[str, Any] | None,
    ) -> None:
        super().__init__(accelerator)
        self.student, self._stage = student, stage
        self._paths = converted_attention(student)
        layers = decoder_layers(teacher)
        self._teacher = frozen_teacher(teacher, accelerator, layers)
        self._calls = Calls({i: getattr(layers[i], path.rsplit(".", 1)[-1]) for i, path in self._paths.items()})
        errors = {i: LayerError(student.get_submodule(path)) for i, path in self._paths.items()}
        for error in errors.values():
            receive(error, accelerator)
        self._memory = memory or self._measure(errors, first)
        self.parts = [self._part(i, error) for i, error in errors.items()]

    def memory(self) -> dict[str, Any]:
        """The measurements."""
        return self._memory

    def backward(self, batch: Batch, *, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        """One teacher pass, then forward and backward layer by layer. `loss` is the layers' mean relative error."""
        with self.split(batch) as own:
            return self._backward(own, weight, share, last)

    def _backward(self, batch: Batch, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        calls = self._teacher_calls(batch)
        result: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for i, part in zip(self._paths, self.parts, strict=True):
            with self.accumulating(part, last=last):
                with self.accelerator.autocast():
                    sums = part.module(calls.pop(i))
                error = sums["error"] * (weight / self._memory["power"][str(i)])
                balance = sums["balance"] * share
                self.add_gradients(error + balance)
            result[f"error_{i}"] = error.detach()
            losses.append(error.detach())
            result["balance"] = result.get("balance", 0) + balance.detach() / len(self.parts)
        result["loss"] = torch.stack(losses).mean()
        return result

    def held_out(self, batch: Batch) -> dict[str, Tensor]:
        """Squared error of each layer, and its target's square; zeros of rows that predict nothing."""
        sums: dict[str, Tensor] = {}
        real = (batch["targets"] != IGNORED).any()
        with self.split(batch) as own:
            calls = self._teacher_calls(own)
            for i, part in zip(self._paths, self.parts, strict=True):
                with self.accelerator.autocast():
                    found = part.module(calls.pop(i))
                sums |= {f"error_{i}": found["error"] * real, f"power_{i}": found["power"] * real}
        return sums

    def held_out_means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The layers' mean relative error, as `loss` is."""
        errors = [sums[f"error_{i}"] / sums[f"power_{i}"] for i in self._paths]
        return {"valid_loss": sum(errors) / len(errors)}

    def state_dict(self) -> dict[str, Tensor]:
        """The student with its layers put back."""
        trained = {
            f"{path}.{name.removeprefix('attention.')}": value
            for path, part in zip(self._paths.values(), self.parts, strict=True)
            for name, value in full_state(part.module).items()
        }
        if not self.accelerator.is_main_process:
            return {}
        state = self.student.state_dict()
        return {name: trained[name] if name in trained else value.cpu() for name, value in state.items()}

    def details(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Relative error of each layer before and after."""
        initial = self._memory["initial"]
        after = {str(i): ([initial[str(i)], *_errors(records, i)])[-1] for i in self._paths}
        return {"layers": {i: {"before": initial[i], "after": error} for i, error in after.items()}}

    def _part(self, index: int, error: LayerError) -> Part:
        share_out([error], self.accelerator, trained=True)
        optimizer, rates = make_optimizer(
            error.named_parameters(),
            self._stage,
            is_mixer=lambda name: True,
            is_inner=lambda name: True,
            fused=self.accelerator.device.type == "cuda",
        )
        return Part(f"layer_{index}", *prepared(error, optimizer, self.accelerator), rates)

    @torch.no_grad()
    def _teacher_calls(self, batch: Batch) -> dict[int, Call]:
        """Inputs and outputs of the teacher's attention, with what the student's needs added."""
        input_ids, position_ids = batch["input_ids"], batch["position_ids"]
        self._teacher(input_ids, position_ids)
        extra = converted_arguments(self.student, position_ids)
        calls = dict(self._calls.last)
        self._calls.last.clear()
        for call in calls.values():
            call.kwargs = {**call.kwargs, **extra}
        return calls

    def _measure(self, errors: dict[int, LayerError], first: Sequence[Batch]) -> dict[str, Any]:
        """The size of each layer's target and its relative error, over the first step."""
        with progress("measuring layers", 1):
            sums = error_sums(errors, self._moved(first), self._teacher_calls, self.accelerator)
        return {
            "power": {str(i): power / tokens for i, (_, power, tokens) in sums.items()},
            "initial": {str(i): error / power for i, (error, power, _) in sums.items()},
        }

    def _moved(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Micro batches on the device, each while models know how its rows are split."""
        for batch in batches:
            with self.split(self.on_device(batch)) as own:
                yield own


def _errors(records: list[dict[str, Any]], layer: int) -> list[float]:
    """A layer's error in each step that trained it."""
    return [error for record in records if (error := record.get(f"error_{layer}")) is not None]


def converted_arguments(student: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """What a converted layer's attention needs beside its teacher's arguments: sequences and window masks.

    Args:
        student: the converted model.
        position_ids: [B, T], restarting with each document; of this process's tokens where rows are split.
    """
    found = dict(enumerate(layer_mixers(student.config)))
    by_layer = {i: (mixer.window, mixer.sinks) for i, mixer in found.items() if isinstance(mixer, WindowMixer)}
    if (shard := current_shard()) is not None:
        return split_arguments(shard, by_layer)
    shape = position_ids.shape[0], position_ids.shape[1]
    starts = document_starts(position_ids, shape[0])
    windows = set(by_layer.values())
    kind = str(student.config._attn_implementation)
    masks = {
        mask_key(window, sinks): attention_mask_for(
            kind, training_sees(None, starts, shape, window, sinks, position_ids.device), student.dtype
        )
        for window, sinks in windows
    }
    return {
        LAYOUT: sequence_layout(shape, position_ids.device, starts=starts),
        MASKS: masks,
    }
