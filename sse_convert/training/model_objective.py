"""What distillation and up-training share: one module that holds the whole student, one optimizer."""

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.compat import of_any_length
from sse_convert.console import say
from sse_convert.data.packing import IGNORED
from sse_convert.modeling.architectures import backbone_of, source_spec
from sse_convert.modeling.head import Head
from sse_convert.modeling.layer_arguments import OFFSETS
from sse_convert.recipe.schema import Stage, Train
from sse_convert.training.checkpoint import full_state
from sse_convert.training.compiling import compile_layers
from sse_convert.training.context import ROW_POSITIONS
from sse_convert.training.cuda_graphs import CudaDevice, RecordedPass, padded_offsets, unrecordable
from sse_convert.training.frozen_matrices import hold_low, with_originals
from sse_convert.training.lora import merge_lora
from sse_convert.training.losses import linear_cross_entropy, linear_kl
from sse_convert.training.objective import Batch, Objective, Part
from sse_convert.training.optimizer import make_optimizer
from sse_convert.training.setup import (
    autocast_dtype,
    converted_attention,
    decoder_layers,
    prepare_parameters,
    recompute_activations,
)
from sse_convert.training.sharding import is_sharded, prepared, share_out

_STUDENT = "student."


@dc.dataclass(frozen=True, slots=True)
class Student:
    """A student with what is not trained frozen."""

    model: PreTrainedModel
    """on the device; where it is sharded, what lies around its layers is still on the first process's host"""
    originals: dict[str, Tensor]
    """of the main process: matrices as they were, where the lower dtype does not hold their values"""

    @staticmethod
    def of(model: PreTrainedModel, accelerator: Accelerator, stage: Stage, train: Train) -> "Student":
        """Freeze, and free the host's memory, before a teacher is loaded.

        Args:
            model: from `load_student`.
            accelerator: of the stage.
            stage: says what is trained.
            train: LoRA settings.
        """
        prepare_parameters(model, stage, train)
        if is_sharded(accelerator):
            share_out(decoder_layers(model), accelerator, trained=True)
            return Student(model, {})
        low = autocast_dtype(accelerator)
        originals = {} if low is None else hold_low(model, low)
        model.to(accelerator.device)  # type: ignore[arg-type]
        return Student(model, originals if accelerator.is_main_process else {})


class WholeModel(Objective):
    """A loss of the whole student.

    Args:
        accelerator: of the stage.
        student: the converted model.
        loss: a module with the student as `student`, whose forward gives sums over tokens and the balance loss.
        stage: settings.
        train: whether layers are compiled.
    """

    def __init__(self, accelerator: Accelerator, student: Student, loss: nn.Module, stage: Stage, train: Train) -> None:
        super().__init__(accelerator)
        self.student, self._originals = student.model, student.originals
        self._lora = stage.train == "lora"
        self._picks = stage.loss == "ce" or stage.loss_mask != "all"
        if stage.gradient_checkpointing is True:
            recompute_activations(self.student)
        self._compiled = train.compile is True
        if self._compiled:
            compile_layers(self.student)
        layers = f"{_STUDENT}{source_spec(self.student.config.model_type).layers_path}."
        mixers = tuple(f"{_STUDENT}{path}." for path in converted_attention(self.student).values())
        share_out([loss], accelerator, trained=True)
        optimizer, rates = make_optimizer(
            loss.named_parameters(),
            stage,
            is_mixer=lambda name: name.startswith(mixers),
            is_inner=lambda name: name.startswith(layers),
            fused=accelerator.device.type == "cuda",
        )
        self.parts = [Part("model", *prepared(loss, optimizer, accelerator), rates)]
        self._recorded = self._recorder(stage) if train.cuda_graphs is True else None

    def count(self, batch: Batch) -> int:
        """Tokens that the loss is averaged over: those that predict something, or all."""
        return int((batch["targets"] != IGNORED).sum()) if self._picks else super().count(batch)

    def on_device(self, batch: Batch) -> Batch:
        """With where documents begin, if layers are compiled, whose programs are for any documents. Without positions
        where every row is one document: models count those themselves, and the student does not look on the device for
        where documents begin. Otherwise with that, where passes are recorded. As it is where rows are split."""
        if ROW_POSITIONS in batch:
            return super().on_device(batch)
        starts = batch["position_ids"].flatten() == 0
        if self._compiled:
            moved = super().on_device({**batch, OFFSETS: padded_offsets(starts)})
            return {**moved, OFFSETS: of_any_length(moved[OFFSETS])}
        if int(starts.sum()) == len(batch["position_ids"]):
            batch = {name: value for name, value in batch.items() if name != "position_ids"}
        elif self._recorded is not None:
            batch = {**batch, OFFSETS: padded_offsets(starts)}
        return super().on_device(batch)

    def backward(self, batch: Batch, *, weight: float, share: float, last: bool) -> dict[str, Tensor]:
        """Forward and backward of the whole model. `loss` is per token, without the balance loss."""
        (part,) = self.parts
        if self._recorded is not None:
            return self._recorded(batch, weight, share)
        with self.accumulating(part, last=last), self.split(batch) as own:
            return self._pass(own, weight, share)

    def _pass(self, batch: Batch, weight: Any, share: float) -> dict[str, Tensor]:
        """Forward and backward; `weight` is a float or 0-d."""
        with self.accelerator.autocast():
            sums = self.parts[0].module(**batch)
        parts = {name: value * (share if name == "balance" else weight) for name, value in sums.items()}
        self.add_gradients(parts["loss"] + parts["balance"])
        return {name: value.detach() for name, value in parts.items()}

    def held_out(self, batch: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, KL where the teacher is there, and tokens that are predicted."""
        with self.split(batch) as own, self.accelerator.autocast():
            found: dict[str, Tensor] = self.parts[0].module(**held_out_arguments(own))
        return found

    def held_out_means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Per token."""
        tokens = max(1.0, sums["tokens"])
        return {f"valid_{name}": value / tokens for name, value in sums.items() if name != "tokens"}

    def close(self) -> None:
        """Free what was recorded as well, and the objective from what refers to it."""
        super().close()
        self._recorded = None

    def _recorder(self, stage: Stage) -> RecordedPass | None:
        if (why := unrecordable(self.accelerator, self.student, stage)) is None:
            return RecordedPass(self._pass, self.student, CudaDevice(self.accelerator.device))
        if self.accelerator.is_main_process:
            say(f"{stage.name}: no CUDA graphs, since {why}")
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """The student, with LoRA merged and tied weights once."""
        tied = self.student.all_tied_weights_keys
        whole = {name.removeprefix(_STUDENT): value for name, value in full_state(self.parts[0].module).items()}
        state = with_originals({name: value for name, value in whole.items() if name not in tied}, self._originals)
        return merge_lora(state, self.student) if state and self._lora else state


def held_out_arguments(batch: Batch) -> dict[str, Any]:
    """What the losses take of a micro batch of held-out text."""
    names = ("input_ids", "targets", "position_ids", OFFSETS)
    return {"held_out": True, **{name: batch[name] for name in names if name in batch}}


def held_out_sums(
    hidden: Tensor, head: Head, targets: Tensor, teacher: tuple[Tensor, Head] | None = None
) -> dict[str, Tensor]:
    """`loss`, the cross entropy, `tokens`, and with a teacher `kl`, over the tokens that predict something; 0-d.

    Args:
        hidden: [B, T, D] final hidden states.
        head: the student's head.
        targets: int64 [B, T], -100 where there is nothing to predict.
        teacher: its final hidden states and its head.
    """
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    kept = wanted != IGNORED
    sums = {"loss": linear_cross_entropy(flat, head, wanted), "tokens": kept.sum()}
    if teacher is not None:
        sums["kl"] = linear_kl(flat[kept], head, teacher[0].flatten(0, 1)[kept], teacher[1])
    return sums


def hidden_and_balance(
    student: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor | None,
    offsets: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Final hidden states [B, T, D] of a converted model and its weighted balance losses, 0-d: that of partitions, and
    that of experts where its configuration says `output_router_logits`.

    Args:
        student: the model.
        input_ids: [B, T].
        position_ids: [B, T] if documents begin within rows.
        offsets: of those documents, if they are known (see `layer_arguments.OFFSETS`).
        attention_mask: [B, T], 0 in the padding; None where there is none.
    """
    where = {"position_ids": position_ids, OFFSETS: offsets, "attention_mask": attention_mask}
    outputs = backbone_of(student)(input_ids=input_ids, use_cache=False, **where)
    model: Any = student
    balance = model.sse_balance_loss()
    if (logits := getattr(outputs, "router_logits", None)) is not None:
        balance = balance + model.sse_expert_loss(logits).to(balance.device)
    return outputs.last_hidden_state, balance
