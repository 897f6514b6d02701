"""`layer_mse`: every converted layer learns to give its teacher layer's output, from its teacher layer's input.

The teacher runs once; what flows on is the teacher's output, so layers do not depend on each other. Each has its own
optimizer and its own backward, and only one layer's activations are alive at a time.

Source: attention transfer as in RADLADS (arXiv:2505.03005), stage 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.mixers import SlidingMixer
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.hybrid import LAYOUT
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import document_layout, document_starts, row_layout
from sse_convert.modeling.sliding import MASKS, attention_mask_for, mask_key, training_mask
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import full_state
from sse_convert.training.losses import squared_error
from sse_convert.training.objective import Batch, Call, Calls, Objective, Part, frozen_teacher
from sse_convert.training.setup import converted_attention, decoder_layers, make_optimizer, shard_by


class LayerError(nn.Module):
    """One layer's attention and how far it is from its teacher's, in one forward for data-parallel wrappers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, call: Call) -> dict[str, Tensor]:
        """Squared error and the target's square, summed over tokens, and the balance loss; all 0-d."""
        output = self.attention(*call.args, **call.kwargs)[0]
        error, power = squared_error(output, call.output)
        balance = self.attention.balance_loss() if isinstance(self.attention, SSEAttention) else None
        return {"error": error, "power": power, "balance": error.new_zeros(()) if balance is None else balance}


class Align(Objective):
    """Alignment of all converted layers.

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
        self.student = student
        self._paths = converted_attention(student)
        layers = decoder_layers(teacher)
        spec_paths = {i: path.rsplit(".", 1)[-1] for i, path in self._paths.items()}
        self._calls = Calls({i: getattr(layers[i], name) for i, name in spec_paths.items()})
        self._teacher = frozen_teacher(teacher, accelerator, layers)
        errors = {i: LayerError(student.get_submodule(path)) for i, path in self._paths.items()}
        self._memory = memory or self._measured(errors, first)
        self._scale = {int(i): size for i, size in self._memory["power"].items()}
        self._initial = {int(i): error for i, error in self._memory["initial"].items()}
        trained = [i for i in errors if self._initial[i] >= stage.skip_below]
        self.parts = [self._part(i, errors[i], stage) for i in trained]
        self._trained = trained

    def memory(self) -> dict[str, Any]:
        """The first step's measurement."""
        return self._memory

    def count(self, batch: Batch) -> int:
        """All tokens."""
        return batch["input_ids"].numel()

    def backward(self, batch: Batch, *, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        """One teacher pass, then forward and backward layer by layer. `loss` is the layers' mean relative error."""
        calls = self._teacher_calls(batch)
        result: dict[str, Tensor] = {}
        for i, part in zip(self._trained, self.parts, strict=True):
            with self.accumulating(part, last=last):
                with self.accelerator.autocast():
                    sums = part.module(calls.pop(i))
                error = sums["error"] * (weight / self._scale[i])
                balance = sums["balance"] * share
                self.add_gradients(error + balance)
            result[f"error_{i}"] = error.detach()
            result["balance"] = result.get("balance", 0) + balance.detach() / len(self.parts)
        result["loss"] = torch.stack([result[f"error_{i}"] for i in self._trained]).mean()
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """The student with its layers put back."""
        trained = {
            f"{self._paths[i]}.{name.removeprefix('attention.')}": value
            for i, part in zip(self._trained, self.parts, strict=True)
            for name, value in full_state(part.module).items()
        }
        if not self.accelerator.is_main_process:
            return {}
        state = self.student.state_dict()
        return {name: trained[name] if name in trained else value.cpu() for name, value in state.items()}

    def details(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Relative error of each layer before and after."""
        layers = {
            str(i): {"before": before, "after": records[-1][f"error_{i}"] if i in self._trained else before}
            for i, before in self._initial.items()
        }
        return {"layers": layers, "skipped": [i for i in self._initial if i not in self._trained]}

    def _part(self, index: int, error: LayerError, stage: Stage) -> Part:
        shard_by(self.accelerator, None)
        fused = self.accelerator.device.type == "cuda"
        optimizer, rates = make_optimizer(error.named_parameters(), stage, lambda name: True, fused=fused)
        module, prepared = self.accelerator.prepare(error, optimizer)
        return Part(f"layer_{index}", module, prepared, rates)

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

    @torch.no_grad()
    def _measured(self, errors: dict[int, LayerError], first: Sequence[Batch]) -> dict[str, Any]:
        """Mean square of each layer's target and the error relative to it, over the whole first step."""
        sums = {i: torch.zeros(3, dtype=torch.float64) for i in errors}
        for batch in first:
            calls = self._teacher_calls({name: value.to(self.accelerator.device) for name, value in batch.items()})
            for i, error in errors.items():
                error.to(self.accelerator.device).eval()
                with self.accelerator.autocast():
                    found = error(calls.pop(i))
                error.train()
                tokens = torch.tensor(float(self.count(batch)))
                sums[i] += torch.stack([found["error"].cpu(), found["power"].cpu(), tokens]).double()
        total: Tensor = self.accelerator.reduce(torch.stack(list(sums.values())).to(self.accelerator.device), "sum")
        rows = dict(zip(errors, total.tolist(), strict=True))
        return {
            "power": {str(i): power / tokens for i, (_, power, tokens) in rows.items()},
            "initial": {str(i): error / power for i, (error, power, _) in rows.items()},
        }


def converted_arguments(student: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """What a converted layer's attention needs beside its teacher's arguments: sequences and window masks.

    Args:
        student: the converted model.
        position_ids: [B, T], restarting with each document.
    """
    shape = position_ids.shape[0], position_ids.shape[1]
    starts = document_starts(position_ids, shape[0])
    windows = {(m.window, m.sinks) for m in layer_mixers(student.config) if isinstance(m, SlidingMixer)}
    kind = str(student.config._attn_implementation)
    masks = {
        mask_key(window, sinks): attention_mask_for(
            kind, training_mask(None, starts, shape, window, sinks, position_ids.device), student.dtype
        )
        for window, sinks in windows
    }
    return {
        LAYOUT: row_layout(*shape, None, position_ids.device) if starts is None else document_layout(starts),
        MASKS: masks,
    }
