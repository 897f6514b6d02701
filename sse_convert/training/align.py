"""`layer_mse`: every converted layer learns to give its teacher layer's output, from its teacher layer's input.

The teacher runs once; what flows on is the teacher's output, so layers do not depend on each other. Each has its own
optimizer and its own backward, and only one layer's activations are alive at a time.

Source: attention transfer as in RADLADS (arXiv:2505.03005), stage 1.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.mixers import WindowMixer
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.hybrid import LAYOUT
from sse_convert.modeling.layout import document_layout, document_starts, row_layout
from sse_convert.modeling.window.sliding import MASKS, attention_mask_for, mask_key, training_sees
from sse_convert.recipe.schema import Stage
from sse_convert.training.checkpoint import full_state, writing
from sse_convert.training.early_stop import LayerStops
from sse_convert.training.layer_error import LayerError, error_sums
from sse_convert.training.metrics import WITHOUT_WINDOW
from sse_convert.training.objective import Batch, Call, Calls, Objective, Part, frozen_teacher
from sse_convert.training.optimizer import make_optimizer
from sse_convert.training.schedule import Schedule
from sse_convert.training.setup import converted_attention, decoder_layers, shard_by

_FILE = "layers.safetensors"


class Align(Objective):
    """Alignment of all converted layers, together or a group at a time.

    Layers share no parameter, no optimizer and no gradient norm, so groups give what all layers at once give, to the
    bit, as long as the forward passes draw no random numbers and no step is left out.

    Args:
        accelerator: of the stage.
        student: the converted model.
        teacher: the original model.
        stage: settings.
        first: this process's micro batches of the first step, which measure how far each layer is off at the start.
        held_out: micro batches that are not trained on, on which `skip_below` is judged; empty judges it on `first`.
        memory: what an interrupted run remembered; replaces the measurement.
        folder: where groups of layers that are finished wait for the others.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        stage: Stage,
        *,
        first: Sequence[Batch],
        held_out: Sequence[Batch] = (),
        memory: dict[str, Any] | None,
        folder: Path,
    ) -> None:
        super().__init__(accelerator)
        self.student, self.parts = student, []
        self._stage, self._first, self._held_out, self._folder = stage, first, held_out, folder
        self._paths = converted_attention(student)
        self._groups = layer_groups(list(self._paths), stage.layers_at_once)
        self.turns = len(self._groups)
        self._layers = decoder_layers(teacher)
        self._calls = Calls({})
        self._teacher = frozen_teacher(teacher, accelerator, self._layers)
        self._memory = memory or {"power": {}, "initial": {}, "held_out": {}}
        self._stops = LayerStops(stage.stop, self._memory.get("stops"))
        self._trained: list[int] = []

    def begin(self, turn: int) -> None:
        """Measure the layers of a group, unless that was done, and make their optimizers."""
        layers = self._groups[turn]
        self._calls.close()
        self._calls = Calls({i: getattr(self._layers[i], self._paths[i].rsplit(".", 1)[-1]) for i in layers})
        errors = {i: LayerError(self.student.get_submodule(self._paths[i])) for i in layers}
        if str(layers[0]) not in self._memory["power"]:
            self._measure(errors)
        self._trained = [i for i in layers if not self._aligned(i)]
        self.parts = [self._part(i, errors[i], self._stage) for i in self._trained]

    def end(self, turn: int) -> None:
        """Write the group's layers down and free its memory, unless it is the only one."""
        if self.turns == 1:
            return
        state = self._trained_state()
        target = self._folder / f"turn-{turn}"
        if self.accelerator.is_main_process and state and not target.is_dir():
            partial = self._folder / f".turn-{turn}"
            shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
            partial.mkdir(parents=True)
            with writing(partial):
                save_file(state, partial / _FILE)
            partial.rename(target)
        self.accelerator.wait_for_everyone()
        self._trained, self.parts = [], []
        self.accelerator.free_memory()
        self.restore(turn)

    def restore(self, turn: int) -> None:
        """Take the group's layers from where `end` wrote them, onto the CPU."""
        for i in self._groups[turn]:
            self.student.get_submodule(self._paths[i]).to("cpu")
        if (path := self._folder / f"turn-{turn}" / _FILE).is_file():
            self.student.load_state_dict(load_file(path), strict=False)

    @property
    def done(self) -> bool:
        """Whether all layers of the group have stopped early."""
        return bool(self._trained) and all(i in self._stops.stopped for i in self._trained)

    def after_step(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Stop layers that have had enough; `stopped` in the record says which, at which error and why.

        A layer whose window branch is left out in this step is not judged: its error is another layer's.
        """
        running = [i for i in self._trained if i not in self._stops.stopped]
        judged = {i: values[f"error_{i}"] for i in running if self._is_whole(i)}
        new = self._stops.look(step, judged)
        return {"stopped": {str(i): self._stops.stopped[i] for i in new}} if new else {}

    def memory(self) -> dict[str, Any]:
        """The measurements, and what the early stop remembers."""
        return {**self._memory, "stops": self._stops.memory()}

    def count(self, batch: Batch) -> int:
        """All tokens."""
        return batch["input_ids"].numel()

    def backward(self, batch: Batch, *, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        """One teacher pass, then forward and backward layer by layer. `loss` is the mean relative error of the layers,
        of those with their window branch where there are any."""
        calls = self._teacher_calls(batch)
        result: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        without_window: list[Tensor] = []
        for i, part in zip(self._trained, self.parts, strict=True):
            if (stop := self._stops.stopped.get(i)) is not None:
                calls.pop(i)
                losses.append(torch.tensor(stop["error"] * share, device=self.accelerator.device))
                continue
            with self.accumulating(part, last=last):
                with self.accelerator.autocast():
                    sums = part.module(calls.pop(i))
                error = sums["error"] * (weight / self._memory["power"][str(i)])
                balance = sums["balance"] * share
                self.add_gradients(error + balance)
            result[f"error_{i}"] = error.detach()
            (losses if self._is_whole(i) else without_window).append(error.detach())
            result["balance"] = result.get("balance", 0) + balance.detach() / len(self.parts)
        result["loss"] = torch.stack(losses or without_window).mean()
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """The student with its layers put back."""
        trained = self._trained_state()
        if not self.accelerator.is_main_process:
            return {}
        state = self.student.state_dict()
        return {name: trained[name] if name in trained else value.cpu() for name, value in state.items()}

    def _trained_state(self) -> dict[str, Tensor]:
        """The layers of this turn, named as in the student; every process must call it, all but the main one get {}."""
        return {
            f"{self._paths[i]}.{name.removeprefix('attention.')}": value
            for i, part in zip(self._trained, self.parts, strict=True)
            for name, value in full_state(part.module).items()
        }

    def curve(self, records: list[dict[str, Any]]) -> list[float]:
        """The mean over layers of each step's error; a layer that stopped early stays where it was."""
        if self.turns == 1:
            return super().curve(records)
        curves = [curve for i in self._paths if (curve := _errors(records, i, whole=True))]
        longest = max(map(len, curves), default=0)
        return [fmean(curve[min(t, len(curve) - 1)] for curve in curves) for t in range(longest)]

    def details(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Relative error of each layer before and after, which were left alone, and which stopped early."""
        layers: dict[str, dict[str, Any]] = {}
        made = 0
        for i in self._paths:
            before = self._memory["initial"][str(i)]
            layers[str(i)] = {"before": before, "after": (_errors(records, i, whole=True) or [before])[-1]}
            if (held_out := self._memory.get("held_out", {}).get(str(i))) is not None:
                layers[str(i)]["held_out"] = held_out
            if (stop := self._stops.stopped.get(i)) is not None:
                layers[str(i)]["stopped"] = stop
            made += len(_errors(records, i))
        planned = Schedule.of(self._stage).steps * len(layers)
        skipped = [i for i in self._paths if self._aligned(i)]
        return {"layers": layers, "skipped": skipped, "layer_steps": made, "layer_steps_planned": planned}

    def _is_whole(self, layer: int) -> bool:
        """Whether this step keeps the layer's window branch, or the layer has none."""
        return bool(getattr(self.student.get_submodule(self._paths[layer]), "window_kept", True))

    def _aligned(self, layer: int) -> bool:
        """Whether a layer's error at the start is below `skip_below`."""
        judged = self._memory.get("held_out") or self._memory["initial"]
        return bool(judged[str(layer)] < self._stage.skip_below)

    def _part(self, index: int, error: LayerError, stage: Stage) -> Part:
        shard_by(self.accelerator, None)
        optimizer, rates = make_optimizer(
            error.named_parameters(),
            stage,
            is_mixer=lambda name: True,
            is_inner=lambda name: True,
            fused=self.accelerator.device.type == "cuda",
        )
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

    def _measure(self, errors: dict[int, LayerError]) -> None:
        """Remember the size of each layer's target and its relative error, over the first step and held-out rows."""
        sums = error_sums(errors, self._first, self._teacher_calls, self.accelerator)
        self._memory["power"] |= {str(i): power / tokens for i, (_, power, tokens) in sums.items()}
        self._memory["initial"] |= {str(i): error / power for i, (error, power, _) in sums.items()}
        if self._held_out:
            sums = error_sums(errors, self._held_out, self._teacher_calls, self.accelerator)
            self._memory["held_out"] |= {str(i): error / power for i, (error, power, _) in sums.items()}


def layer_groups(layers: list[int], at_once: int | None) -> list[list[int]]:
    """Neighbouring layers in groups of at most `at_once`; None makes one group."""
    size = at_once or len(layers) or 1
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _errors(records: list[dict[str, Any]], layer: int, *, whole: bool = False) -> list[float]:
    """A layer's error in each step that trained it; `whole` leaves out those without its window branch."""
    key = f"error_{layer}"
    used = [record for record in records if record.get(key) is not None]
    return [record[key] for record in used if not (whole and layer in record.get(WITHOUT_WINDOW, []))]


def converted_arguments(student: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """What a converted layer's attention needs beside its teacher's arguments: sequences and window masks.

    Args:
        student: the converted model.
        position_ids: [B, T], restarting with each document.
    """
    shape = position_ids.shape[0], position_ids.shape[1]
    starts = document_starts(position_ids, shape[0])
    windows = {(m.window, m.sinks) for m in layer_mixers(student.config) if isinstance(m, WindowMixer)}
    kind = str(student.config._attn_implementation)
    masks = {
        mask_key(window, sinks): attention_mask_for(
            kind, training_sees(None, starts, shape, window, sinks, position_ids.device), student.dtype
        )
        for window, sinks in windows
    }
    return {
        LAYOUT: row_layout(*shape, None, position_ids.device) if starts is None else document_layout(starts),
        MASKS: masks,
    }
